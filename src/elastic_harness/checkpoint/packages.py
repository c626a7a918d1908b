"""Versions of what computed a checkpoint."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

NAMES = ("elastic-harness", "torch", "numpy", "safetensors")


@cache
def packages() -> dict[str, str]:
    """Python's version and those of the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
