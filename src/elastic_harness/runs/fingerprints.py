"""Whether an entry of a program's fingerprint fits the run's. An earlier version may have recorded the run's."""

from __future__ import annotations

OF_THE_TRAINER = ("run.precision", "compile")
"""Settings of the built-in trainer. Earlier versions recorded them for every program, in which they did nothing."""


MOVED_CLASSES = {"elastic_harness.models.gpt.GPT": "elastic_harness.gpt.model.GPT"}


def fits(name: str, run: object, own: object) -> bool:
    """Return whether a program may go on with a run, as far as one entry tells. None: the entry is not there."""
    if name == "model.class":
        return MOVED_CLASSES.get(str(run), run) == MOVED_CLASSES.get(str(own), own)
    return run == own or (own is None and name in OF_THE_TRAINER)
