"""`python -m turnwise` is the command `turnwise`."""

import sys

from turnwise.cli import main

sys.exit(main())
