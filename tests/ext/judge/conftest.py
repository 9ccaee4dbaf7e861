"""What the tests here share is found by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # test files are imported by path
