"""Whether a worker fits the run: its fingerprint against the run's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HARDWARE_KEYS = frozenset(
    {"cpu", "cpu_capability", "onednn_max_isa", "mkl_cbwr", "device", "torch", "threads", "compile"}
)
"""What `exactness: relaxed` allows to differ between members: it changes bits, not what is computed."""


def difference(run: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """ "" if the worker fits, else every key that differs with both values, and what to do about it."""
    if not run or not worker:
        return ""
    relaxed = run.get("exactness") == "relaxed" == worker.get("exactness")
    keys = sorted(k for k in run.keys() | worker.keys() if run.get(k) != worker.get(k))
    keys = [k for k in keys if not (relaxed and k in HARDWARE_KEYS)]
    if not keys:
        return ""
    named = "; ".join(f"{k}: the run has {run.get(k)!r}, this worker {worker.get(k)!r}" for k in keys)
    advice = "use the run's values, or another --run-dir, or --fresh to start anew"
    if set(keys) <= HARDWARE_KEYS:
        advice += "; elastic.exactness=relaxed admits such a worker, without bit-exactness"
    return f"its fingerprint differs ({named}); {advice}"
