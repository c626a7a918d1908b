"""Run a script that fails at a named place the first time it is started, and not after a restart.

python once.py RULES RANK SCRIPT [argument …]
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    rules, rank, script, *arguments = sys.argv[1:]
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and os.environ.get("RANK", "0") == rank:
        os.environ["ELASTIC_HARNESS_FAILPOINTS"] = rules
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
