"""Elastic, fault-tolerant training: a worker may die at any moment without changing one bit of the result.

    start              train your model in your own loop           launch       start a job, as the command does
    Config             what a run is: steps, batch, seed, …        load_config  from a YAML file, with overrides
    ResumableDataset   samples in an order that survives restarts  Mixture      several data sets in proportions
    CheckpointManager  the same checkpoints for any script         Validation   shared out over the workers
    HarnessError       what is raised on purpose

Importing this package is cheap: everything that needs torch is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.checkpoint.manager import CheckpointManager
    from elastic_harness.config import CheckpointConfig, Config, load_config
    from elastic_harness.data.dataset import ResumableDataset, ResumableLoader
    from elastic_harness.data.mixture import Mixture
    from elastic_harness.errors import ConfigError, HarnessError
    from elastic_harness.gpt.config import TrainerConfig
    from elastic_harness.launching import launch
    from elastic_harness.train.batches import total_steps
    from elastic_harness.train.run import start
    from elastic_harness.train.validation import Validation

__version__ = "0.1.0"
__all__ = [
    "CheckpointConfig", "CheckpointManager", "Config", "ConfigError", "HarnessError", "Mixture", "ResumableDataset",
    "ResumableLoader", "TrainerConfig", "Validation", "__version__", "launch", "load_config", "start",
    "total_steps",
]  # fmt: skip

_HOMES = {
    "CheckpointConfig": "elastic_harness.config",
    "CheckpointManager": "elastic_harness.checkpoint.manager",
    "Config": "elastic_harness.config",
    "ConfigError": "elastic_harness.errors",
    "HarnessError": "elastic_harness.errors",
    "Mixture": "elastic_harness.data.mixture",
    "ResumableDataset": "elastic_harness.data.dataset",
    "ResumableLoader": "elastic_harness.data.dataset",
    "TrainerConfig": "elastic_harness.gpt.config",
    "Validation": "elastic_harness.train.validation",
    "launch": "elastic_harness.launching",
    "load_config": "elastic_harness.config",
    "start": "elastic_harness.train.run",
    "total_steps": "elastic_harness.train.batches",
}

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
