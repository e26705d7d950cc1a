"""`python -m rdmanet`: the command line."""

import sys

from rdmanet.cli import main

sys.exit(main())
