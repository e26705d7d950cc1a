"""What connections may come to need, and a short one does not: imported by the first server, and by who asks for it.

A program that connects, says something short and ends spent a third of its processor time on importing this. So each of
these modules is imported where it is first used: regions.py when memory is offered on a connection or wanted by a long
read, explaining.py when somebody asks what a connection does, also if no descriptor is left then (base/late_import.py).
A program that gives up the right to read its modules has them by its server, or, if it only connects, by naming
``rdmanet.OfferedMemory``.
"""

from rdmanet.base import accounts as accounts
from rdmanet.stream import explaining as explaining
from rdmanet.stream import regions as regions
from rdmanet.stream.peer_memory import OfferedMemory as OfferedMemory
