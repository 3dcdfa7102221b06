"""`python -m sam.cli`: the same as the console script `sam`."""

import sys

from sam.cli import main

if __name__ == "__main__":
    sys.exit(main())
