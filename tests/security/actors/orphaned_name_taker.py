"""boxed_name_taker.py, whose process ends when it listens: a child of its goes on with its sockets."""

import os

from link_words import become
from taking import take


def say_as_orphan(**facts):
    if "has" in facts and os.fork():
        os._exit(0)
    say(**facts)


roles, argv = argv[0].split(","), argv[1:]
for role in roles:
    try:
        become(role)
    except OSError as exc:
        say(unfit=f"{role}: {exc}")
        raise SystemExit from exc

take(argv, say_as_orphan, hear)
