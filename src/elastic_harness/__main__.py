"""`python -m elastic_harness` is the command `elastic-harness`."""

import sys

from elastic_harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
