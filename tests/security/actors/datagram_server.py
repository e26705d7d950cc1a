"""Tells who asks the number of its queue pair for datagrams: argv is the address. Says `port`, and each `request`."""

import select

from rdmanet.cm import CMEventChannel, CMEventType, Library, PortSpace

channel = CMEventChannel(Library.embedded())
listener = channel.create_id(PortSpace.UDP)
listener.bind_addr((argv[0], 0))
listener.listen(8)
say(port=listener.local_addr[1])
while 0 not in select.select([0, channel], [], [])[0]:
    while (event := channel.get_event()) is not None:
        if event.type is CMEventType.CONNECT_REQUEST:
            say(request=event.private_data.rstrip(b"\0").decode())
            event.id.accept(b"a number", qp_num=0x1234)
            event.id.close()
