"""`python -m rdmanet`: the command line, which is `rdmanet` where the package is installed."""

import sys

from rdmanet.cli import main

sys.exit(main())
