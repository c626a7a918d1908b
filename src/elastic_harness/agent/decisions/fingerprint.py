"""Whether a worker fits the run, by their fingerprints. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_harness.runs.fingerprints import HARDWARE_KEYS, differing, in_words


def majority(asking: Sequence[Mapping[str, Any]], target: int, *, complete: bool) -> dict[str, Any] | None:
    """Return the fingerprint of a new run of `target` workers, from the fingerprints of those that are `asking`. It is
    the one that more than half of the target have. If no more are to be expected, it is the most frequent one, and of
    equals the first. Return None while others have to be waited for."""
    if not asking:
        return None
    counts = [sum(own == other for other in asking) for own in asking]
    best = max(counts)
    if 2 * best <= target and len(asking) < target and not complete:
        return None
    return dict(asking[counts.index(best)])


def difference(run: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """Return "" if the worker fits. Otherwise return every key that differs, with both values, and what to do about
    it."""
    if not run or not worker:
        return ""
    relaxed = run.get("exactness") == "relaxed" == worker.get("exactness")
    keys = [k for k in differing(run, worker) if not (relaxed and k in HARDWARE_KEYS)]
    if not keys:
        return ""
    named = in_words(keys, run, worker, "this worker")
    advice = (
        "use the run's values; or begin a new run from its state with these: `launch --from RUN --run-dir NEW …`; or "
        "start anew with --fresh"
    )
    if set(keys) <= HARDWARE_KEYS:
        advice += "; elastic.exactness=relaxed admits such a worker, without bit-exactness"
    return f"its fingerprint differs ({named}); {advice}"
