"""The settings that only the built-in trainer reads, and what to do instead in a loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INSTEAD = {
    "data": "give start() a dataset of your own; elastic_harness.ResumableDataset reads token indexes",
    "model": "build the model yourself and give it to start()",
    "optimizer": "make the optimizer yourself and give it to start()",
    "scheduler": "make the schedule yourself and give it to start() as scheduler=",
    "trainer": "write it in that loop",
    "trainer.precision": "compute the loss under `with torch.autocast(DEVICE, torch.bfloat16):`; for float16 also give "
    "start() a scaler=torch.amp.GradScaler(DEVICE)",
    "trainer.device": "move the model there before you make its optimizer, and each batch in the loop",
    "trainer.compile": "give start() the plain model and compute the loss with torch.compile(model)",
    "trainer.eval_interval_steps": "give start() a validation=Validation(MEASURE, BATCHES, every=N)",
    "trainer.eval_batches": "give start() the batches, in validation=Validation(MEASURE, BATCHES, every=N)",
    "trainer.log_interval_steps": "print what you want after a step, in `if run.rank == 0 and run.step % N == 0:`",
    "trainer.ema_decay": "give start() ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)), both of "
    "torch.optim.swa_utils",
    "trainer.tracking": "say --track to `elastic-harness launch`, or follow the run with `elastic-harness track`",
}
"""What to do, by section or by setting."""
SECTIONS = tuple(key for key in INSTEAD if "." not in key)
_OLD, _NEW = "training.", "trainer."


def refusal(key: str, value: object) -> str:
    """Return a sentence: only the built-in trainer reads this setting, and what to do in a loop of one's own."""
    place = _moved(key)
    section = place.partition(".")[0]
    reads = "reads it" if place == key else f"reads it, as {place}"
    instead = INSTEAD.get(place, INSTEAD[section])
    shown = list(value) if isinstance(value, tuple) else value
    return f"{key} is {shown!r}, but only the built-in trainer {reads}; in a loop of your own {instead}."


def refusals(prefix: str, values: Mapping[str, Any]) -> list[str]:
    """Return a refusal for each of these keys that is the trainer's. The section `prefix` does not know them."""
    found: list[str] = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in SECTIONS:
            settings = value if isinstance(value, Mapping) and value else None
            found += [refusal(f"{key}.{n}", v) for n, v in settings.items()] if settings else [refusal(key, value)]
        elif _moved(key) != key:
            found.append(refusal(key, value))
    return found


def moved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's configuration that an earlier version has recorded, with each setting in its section."""
    training = dict(values.get("training") or {})
    own = {name: training.pop(name) for name in list(training) if _moved(_OLD + name) != _OLD + name}
    return {**values, "training": training, "trainer": {**own, **(values.get("trainer") or {})}}


def moved_override(word: str) -> str:
    """Return a word of a trainer's command line that an earlier version has recorded, with the setting's new place."""
    key, equals, value = word.partition("=")
    return _moved(key) + equals + value


def _moved(key: str) -> str:
    """Return the new key of a setting that once was in another section, else the key itself."""
    place = _NEW + key.removeprefix(_OLD)
    return place if key.startswith(_OLD) and place in INSTEAD else key
