"""Names of the field under which settings are known too. An alias counts as its canonical key; both together are an
error. configs/training_config.yaml lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_harness.errors import ConfigError

ALIASES = {
    "training.batch_size": "training.global_batch_samples",
    "training.lr": "optimizer.lr",
    "training.learning_rate": "optimizer.lr",
    "model.num_layers": "model.n_layer",
    "model.num_heads": "model.n_head",
    "elastic.min_nodes": "elastic.min_workers",
    "elastic.max_nodes": "elastic.max_workers",
    "checkpoint.keep_last_n": "checkpoint.keep_last",
}
"""Canonical keys by alias."""


def canonical_key(key: str) -> str:
    """Return the canonical name of a key such as `model.num_layers`."""
    return ALIASES.get(key, key)


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's sections with each alias in its canonical place. Raises ConfigError if a setting is
    given twice."""
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    given: dict[str, str] = {}
    for alias, key in ALIASES.items():
        section, _, name = alias.partition(".")
        if not isinstance(found.get(section), dict) or name not in found[section]:
            continue
        target, _, canonical_name = key.partition(".")
        there = values.get(target)
        other = given.get(key) or (key if isinstance(there, Mapping) and canonical_name in there else "")
        if other:
            raise ConfigError(f"{alias} is another name of {key}, and {other} is given too; leave one of them out.")
        given[key] = alias
        value = found[section].pop(name)
        if not isinstance(found.get(target), dict):
            found[target] = {}
        found[target][canonical_name] = value
    return found


def own_names(section: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return one section's settings with their canonical names, for a section that is made in Python. Aliases of what
    is in another section are not among them."""
    elsewhere = {n: v for n, v in settings.items() if not canonical_key(f"{section}.{n}").startswith(f"{section}.")}
    here = {name: value for name, value in settings.items() if name not in elsewhere}
    return canonical({section: here})[section] | elsewhere
