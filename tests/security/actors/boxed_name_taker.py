"""name_taker.py, locked up by its user: argv is in what, with commas between, and the names.

The roles are link_words.become's. Or it says why it is `unfit`.
"""

from link_words import become
from taking import take

roles, argv = argv[0].split(","), argv[1:]
for role in roles:
    try:
        become(role)
    except OSError as exc:
        say(unfit=f"{role}: {exc}")
        raise SystemExit from exc

take(argv, say, hear)
