"""Elastic, fault-tolerant training: a worker may die at any moment without changing one bit of the result.

Importing this package is cheap: whatever needs torch is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
