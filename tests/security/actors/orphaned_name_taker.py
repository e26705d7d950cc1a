"""boxed_name_taker.py, whose process ends when it listens: a child of its goes on with its sockets."""

import os

from link_words import become_or_end
from taking import take


def say_as_orphan(**facts):
    if "has" in facts and os.fork():
        os._exit(0)
    say(**facts)


roles, *names = argv
become_or_end(roles.split(","), say)
take(names, say_as_orphan, hear)
