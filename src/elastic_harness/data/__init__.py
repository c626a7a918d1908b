"""Text, its order and its schedule: which samples a step reads, from (seed, epoch, position) alone."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Mixture": "mixture",
    "ResumableDataset": "dataset",
    "ResumableLoader": "dataset",
    "TokenIndexFile": "token_index",
    "cu_seqlens": "windows",
}
__all__ = ["Mixture", "ResumableDataset", "ResumableLoader", "TokenIndexFile", "cu_seqlens"]


def __getattr__(name: str) -> Any:
    """Import a name on first use. The dataset needs torch, and to look into a ledger or an index does not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
