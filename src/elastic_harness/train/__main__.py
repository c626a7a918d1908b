"""`python -m elastic_harness.train`: the built-in trainer."""

from __future__ import annotations

import os
import sys

from elastic_harness.errors import HarnessError
from elastic_harness.train.trainer import main

try:
    main()
except HarnessError as error:
    if "ELASTIC_HARNESS_MEMBER" in os.environ:
        raise  # the hook installed by start() reports it to the agent, if it got that far
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
