"""Failures that are no deaths. The modules here are pure rules: others gather the facts and act on the verdicts. In
`watching/` is what gathers by itself, for scripts that do not use the rest of the harness:

    FaultDetector       signals, bad numbers, spikes, memory and hangs in any training loop
    ConsistencyChecker  whether all ranks of a process group hold the same state, bit for bit

An import of this package loads torch only when a name that needs it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.health.consistency import ConsistencyReport, Difference
    from elastic_harness.health.faults import DetectedFault, FaultDetectorConfig, FaultError, FaultKind, Severity
    from elastic_harness.health.watching.checker import ConsistencyChecker
    from elastic_harness.health.watching.detector import FaultDetector
    from elastic_harness.health.watching.replicas import synchronize_state, verify_model_consistency

_HOMES = {
    "ConsistencyChecker": "elastic_harness.health.watching.checker",
    "ConsistencyReport": "elastic_harness.health.consistency",
    "DetectedFault": "elastic_harness.health.faults",
    "Difference": "elastic_harness.health.consistency",
    "FaultDetector": "elastic_harness.health.watching.detector",
    "FaultDetectorConfig": "elastic_harness.health.faults",
    "FaultError": "elastic_harness.health.faults",
    "FaultKind": "elastic_harness.health.faults",
    "Severity": "elastic_harness.health.faults",
    "synchronize_state": "elastic_harness.health.watching.replicas",
    "verify_model_consistency": "elastic_harness.health.watching.replicas",
}
__all__ = [
    "ConsistencyChecker", "ConsistencyReport", "DetectedFault", "Difference", "FaultDetector", "FaultDetectorConfig",
    "FaultError", "FaultKind", "Severity", "synchronize_state", "verify_model_consistency",
]  # fmt: skip

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
