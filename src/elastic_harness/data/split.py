"""Which documents are held out. That depends on their content alone, so it stays the same when data is added."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Split = Literal["train", "validation"]


def held_out(keys: npt.NDArray[Any], fraction: float) -> npt.NDArray[np.bool_]:
    """Return (D,) whether each document, by the hash of its content, is in the validation part."""
    return np.asarray(keys) < np.uint64(int(fraction * 2.0**64))
