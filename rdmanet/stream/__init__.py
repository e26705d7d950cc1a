"""The parts of a connection of the byte stream, of its server and of its loop; rdmanet/transport.py makes them.

`Lifecycle` (lifecycle.py) connects the parts of a connection, which do not know each other.
"""
