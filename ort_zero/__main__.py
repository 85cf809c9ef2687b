"""Run the command line: ``python -m ort_zero``."""

import sys

from ort_zero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
