"""A user's map-style torch dataset, read by sample ids."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_harness.errors import ConfigError


class MapStyle:
    """Gives any object with ``__len__`` and ``__getitem__`` the ``read`` and ``fingerprint`` of a dataset.

    An item must depend on its index alone. An item that draws random numbers must take them from torch's default
    generator, which is seeded for every slot.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        kind = type(dataset).__name__
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"The dataset is a {kind} without __len__ and __getitem__, but samples are read "
                "by their number, which an iterable dataset has not; give a map-style one."
            )
        if len(dataset) < 1:
            raise ConfigError(f"The dataset is a {kind} with no samples; give one with at least one.")
        self.dataset = dataset
        self._collate = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, sample_ids: npt.ArrayLike) -> Any:
        """Return the collated batch of these samples, in this order."""
        if self._collate is None:
            from torch.utils.data import default_collate

            self._collate = default_collate
        return self._collate([self.dataset[int(i)] for i in np.asarray(sample_ids, dtype=np.int64)])

    def fingerprint(self) -> dict[str, Any]:
        """Return the dataset's own fingerprint if it has one, with its class and length."""
        own = getattr(self.dataset, "fingerprint", None)
        return {
            "kind": f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}",
            "n_samples": len(self),
            **(dict(own()) if callable(own) else {}),
        }
