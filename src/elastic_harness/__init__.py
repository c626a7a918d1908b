"""Elastic, fault-tolerant training: a worker may die at any moment without changing one bit of the result.

Importing this package is cheap: whatever needs torch is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.config import Config, TrainerConfig, load_config
    from elastic_harness.train.run import start

__version__ = "0.1.0"
__all__ = ["Config", "TrainerConfig", "__version__", "load_config", "start"]

_HOMES = {
    "Config": "elastic_harness.config",
    "TrainerConfig": "elastic_harness.config",
    "load_config": "elastic_harness.config",
    "start": "elastic_harness.train.run",
}

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
