"""name_taker.py, locked up by its user: argv is in what, with commas between, and the names.

The roles are link_words.become's.
"""

from link_words import become_or_end
from taking import take

roles, *names = argv
become_or_end(roles.split(","), say)
take(names, say, hear)
