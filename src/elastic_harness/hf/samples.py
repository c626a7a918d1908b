"""A dataset of a Trainer, read by sample numbers and collated by its data collator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_harness import ConfigError


class Samples:
    """What `start` needs of a dataset. `datasets.Dataset` is read as it is, from memory-mapped files too."""

    def __init__(self, dataset: Any, collator: Callable[[list[Any]], Any]) -> None:
        kind = type(dataset).__name__
        if isinstance(dataset, torch.utils.data.IterableDataset) or not (
            isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
        ):
            raise ConfigError(
                f"train_dataset is a {kind}, which has no length or cannot be read by number. Each slot reads its own "
                "samples, in any order, on any worker: give a map-style dataset. load_dataset without streaming=True "
                "is one, and memory-mapped, so it needs no memory; Dataset.from_generator writes a stream to disk."
            )
        if len(dataset) < 1:
            raise ConfigError(f"train_dataset is a {kind} with no samples; give one with at least one.")
        check_collator(collator)
        self._dataset = dataset
        self._collator = collator

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, sample_ids: npt.ArrayLike) -> Any:
        """Return the collated batch of these samples, in this order; a mapping as a plain dict."""
        numbers: list[int] = np.asarray(sample_ids, dtype=np.int64).tolist()
        if hasattr(self._dataset, "__getitems__"):
            items = self._dataset.__getitems__(numbers)
        else:
            items = [self._dataset[number] for number in numbers]
        batch = self._collator(items)
        return dict(batch) if isinstance(batch, Mapping) else batch

    def fingerprint(self) -> dict[str, Any]:
        """Return what the dataset is. Its content is compared by the canary, with the first slot that is computed."""
        columns = getattr(self._dataset, "column_names", None)
        return {
            "kind": f"{type(self._dataset).__module__}.{type(self._dataset).__qualname__}",
            "n_samples": len(self),
            **({"columns": sorted(columns)} if isinstance(columns, list) else {}),
        }


def check_collator(collator: Any) -> None:
    """Raise ConfigError for a collator that draws random numbers from a generator of its own."""
    own = random.Random, np.random.Generator, np.random.RandomState, torch.Generator
    inner = getattr(collator, "data_collator", collator)  # transformers wraps it to remove columns
    for name, value in getattr(inner, "__dict__", {}).items():
        if isinstance(value, own) or (name == "seed" and value is not None):
            raise ConfigError(
                f"The data collator {type(inner).__name__} has a generator of its own ({name}={value!r}), whose "
                "numbers depend on which batches a worker has collated before. Leave its seed out: then it draws from "
                "the default generators, which are seeded for every slot."
            )
