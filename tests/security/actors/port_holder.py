"""A TCP program: argv is its address and "listen", or "bind" for one that doesn't. Says its port."""

import socket

holder = socket.socket()
holder.bind((argv[0], 0))
if argv[1] == "listen":
    holder.listen()
say(port=holder.getsockname()[1])
hear()
