"""Whether an entry of a program's fingerprint fits the run's. An earlier version may have recorded the run's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

OF_THE_TRAINER = ("run.precision", "compile")
"""Settings of the built-in trainer. Earlier versions recorded them for every program, in which they did nothing."""


HARDWARE_KEYS = frozenset(
    {"cpu", "cpu_capability", "onednn_max_isa", "mkl_cbwr", "device", "torch", "threads", "compile"}
)
"""What `exactness: relaxed` allows to differ between members: it changes bits, not what is computed."""


MOVED_CLASSES = {"elastic_harness.models.gpt.GPT": "elastic_harness.gpt.model.GPT"}


def differing(run: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the entries in which a program does not fit a run."""
    return sorted(name for name in run.keys() | own.keys() if not fits(name, run.get(name), own.get(name)))


def in_words(names: Iterable[str], run: Mapping[str, Any], own: Mapping[str, Any], whose: str) -> str:
    """Return what these entries are in the run, and in the program; `whose` says which program that is."""
    return "; ".join(f"{name}: the run has {run.get(name)!r}, {whose} {own.get(name)!r}" for name in names)


def fits(name: str, run: object, own: object) -> bool:
    """Return whether a program may go on with a run, as far as one entry tells. None: the entry is not there."""
    if name == "model.class":
        return MOVED_CLASSES.get(str(run), run) == MOVED_CLASSES.get(str(own), own)
    return run == own or (own is None and name in OF_THE_TRAINER)
