"""Settings from a YAML file and ``section.key=value`` overrides. Every key must be a field of its section."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from elastic_harness import own_loop, shape
from elastic_harness.errors import ConfigError
from elastic_harness.setting_aliases import canonical_key
from elastic_harness.typed import Section, fit, section_class

SectionT = TypeVar("SectionT", bound=Section)


def _unknown(prefix: str, name: str, values: Mapping[str, Any], allowed: Sequence[str]) -> ConfigError:
    """Return the error for a key that is no field of its section. `values` holds all such keys."""
    if trainers := own_loop.refusals(prefix, values):
        return ConfigError(" ".join(trainers))
    key = f"{prefix}{name}"
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f" Did you mean {prefix}{close[0]}?" if close else ""
    return ConfigError(f"Unknown configuration key {key}.{hint} Allowed here: {', '.join(allowed)}.")


def check_keys(cls: type[Any], values: Any, prefix: str) -> None:
    """Raise ConfigError for the first key that is no field of its section, with the closest field; or for all keys that
    are the built-in trainer's."""
    if not isinstance(values, Mapping):
        name = prefix.rstrip(".") or "the configuration"
        raise ConfigError(f"{name} is {values!r}, but must be a mapping of keys to values.")
    hints = shape.of(cls)
    unknown = {str(name): value for name, value in values.items() if name not in hints}
    if unknown:
        raise _unknown(prefix, next(iter(unknown)), unknown, list(hints))
    for name, value in values.items():
        section = section_class(hints[name])
        if section is not None and not isinstance(value, section) and value is not None:
            check_keys(section, value, f"{prefix}{name}.")


def build(cls: type[SectionT], values: Mapping[str, Any], prefix: str) -> SectionT:
    """Return the section that these values describe. A setting that they leave out has its default."""
    check_keys(cls, values, prefix)
    arguments: dict[str, Any] = {}
    for name, hint in shape.of(cls).items():
        section = section_class(hint)
        if section is None:
            if name in values:
                arguments[name] = values[name]
        elif values.get(name) is not None:  # a section left empty in the file has its defaults
            given = values[name]
            arguments[name] = given if isinstance(given, section) else section(**given)
    return cls(**arguments)


def apply_override(cls: type[Any], values: dict[str, Any], override: str) -> None:
    """Set one ``section.key=value`` in ``values``. The value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not an override; write section.key=value, for example training.max_steps=60."
        )
    key = canonical_key(key)
    hints = shape.of(cls)
    target, prefix = values, ""
    *sections, name = key.split(".")
    for part in sections:
        section = section_class(hints.get(part))
        if section is None:
            raise _unknown(prefix, part, _nested(key.removeprefix(prefix), text), list(hints))
        inner = target.get(part)
        target[part] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        target, hints, prefix = inner, shape.of(section), f"{prefix}{part}."
    if name not in hints:
        raise _unknown(prefix, name, {name: text}, list(hints))
    if section_class(hints[name]) is not None:
        first = next(iter(shape.of(hints[name])))
        raise ConfigError(f"{key} is a section; name a key in it, for example {key}.{first}={text or '…'}.")
    target[name] = _override_value(key, text, hints[name])


def _nested(key: str, text: str) -> dict[str, Any]:
    """Return the mapping in which a file would hold one setting."""
    name, _, rest = key.partition(".")
    return {name: {rest: text} if rest else text}


def _override_value(key: str, text: str, hint: Any) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if fit(text, hint)[0]:
            return text
        raise ConfigError(f"{key}={text} is not a YAML value: {' '.join(str(error).split())}.") from error
    # A path such as 2024 or 12:30 is text, whatever YAML makes of it.
    return text if not fit(value, hint)[0] and fit(text, hint)[0] else value


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is written twice. YAML would quietly take the last."""


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        key = str(key) if type(key) is int else key
        if not isinstance(key, str):
            raise ConfigError(f"The key {key!r} in line {key_node.start_mark.line + 1} is not text.")
        if key in mapping:
            raise ConfigError(f"The key {key} is given twice, the second time in line {key_node.start_mark.line + 1}.")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. An empty file holds an empty one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"Configuration file {path} does not exist; check the path given to --config.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Configuration file {path} cannot be read as UTF-8 text: {error}.") from error
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"Configuration file {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    except ConfigError as error:
        raise ConfigError(f"Configuration file {path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"Configuration file {path} holds {type(values).__name__}, but must hold sections with keys.")
    return values
