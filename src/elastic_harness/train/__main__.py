"""`python -m elastic_harness.train`: the built-in trainer."""

from __future__ import annotations

import sys

from elastic_harness.errors import HarnessError
from elastic_harness.train.trainer import main

try:
    main()
except HarnessError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
