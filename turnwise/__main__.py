"""`python -m turnwise` is the command `turnwise`."""

import sys

from turnwise.commands.cli import main

sys.exit(main())
