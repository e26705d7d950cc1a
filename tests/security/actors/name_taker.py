"""Takes names of other users' ports, and keeps whatever is said to it there: argv is names, as of taking.py."""

from taking import take

take(argv, say, hear)
