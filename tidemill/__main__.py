"""`python -m tidemill` is the `tidemill` command."""

import sys

from tidemill.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
