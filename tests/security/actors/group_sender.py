"""Sends to a multicast group, as anybody on the network can: argv is the group, the port, the Q_Key, and the words."""

import socket
import struct

from tests.support.versions import WIRE

words = argv[3].encode()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.bind(("127.0.0.1", 0))
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    source_qpn = sender.getsockname()[1] << 8 | 5
    header = struct.pack("!IBBHIIII", 0x524E5544, WIRE, 0, len(words), 0xFFFFFF, source_qpn, int(argv[2]), 0)
    sender.sendto(header + words, (argv[0], int(argv[1])))
say(sent=len(words))
hear()
