"""Learning rate and batch of any PyTorch script whose number of workers changes. The harness needs neither: its global
batch is constant, or changes by settings of its own. Both work alone, need no launcher, and send nothing.

    LRScalingManager             scales the learning rate with the batch, beside any scheduler
    GradientAccumulationManager  keeps the global batch, by more or fewer micro-batches per worker
    ElasticScalingManager        both

An import of this package loads torch only when a manager is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.scaling.accumulation import GradientAccumulationManager
    from elastic_harness.scaling.elastic import ElasticScalingManager
    from elastic_harness.scaling.rate import LRScalingManager
    from elastic_harness.scaling.rules import ScalingConfig, ScalingRule
    from elastic_harness.scaling.shares import GradAccumulationConfig

_HOMES = {
    "ElasticScalingManager": "elastic_harness.scaling.elastic",
    "GradAccumulationConfig": "elastic_harness.scaling.shares",
    "GradientAccumulationManager": "elastic_harness.scaling.accumulation",
    "LRScalingManager": "elastic_harness.scaling.rate",
    "ScalingConfig": "elastic_harness.scaling.rules",
    "ScalingRule": "elastic_harness.scaling.rules",
}
__all__ = [
    "ElasticScalingManager", "GradAccumulationConfig", "GradientAccumulationManager", "LRScalingManager",
    "ScalingConfig", "ScalingRule",
]  # fmt: skip

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
