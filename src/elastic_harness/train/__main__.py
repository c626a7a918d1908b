"""`python -m elastic_harness.train`: the built-in trainer."""

from __future__ import annotations

import os
import sys

from elastic_harness.errors import HarnessError
from elastic_harness.gpt.trainer import main

try:
    main()
except HarnessError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # everything is written; an orderly end of the interpreter would take a second with torch
