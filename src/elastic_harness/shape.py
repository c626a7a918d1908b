"""Parses data from outside this process (a message, a record or a file), and compares it with the shape that its reader
expects, before it is used.

A shape is a table of field names and types, written as type hints. A field whose type admits None may be left out.
Whole numbers fit 64 bits, so that each can be packed, compared and printed.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar

Shape = Mapping[str, Any]
WHOLE_MAX = 1 << 63
UNTOLD = {"untold": True}  # metadata of a field that is not written while it holds its default
_Built = TypeVar("_Built")
_SHOWN_CHARS = 80
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "an object", None: "null"}


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for any other text, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text. Raises ValueError for anything else."""
    value = parse(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is {described(type(value))}, not an object")
    return value


def expect(values: Mapping[str, Any], shape: Shape) -> None:
    """Raise ValueError if a field is missing or of another type; it names the first one. Other fields may be there."""
    for name, hint in shape.items():
        if not _test(hint)(values.get(name)):
            if name not in values:
                raise ValueError(f"{name} is missing")
            shown = repr(values[name])
            shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
            raise ValueError(f"{name} is {shown}; it must be {described(hint)}")


def build(cls: type[_Built], values: Mapping[str, Any]) -> _Built:
    """Return the dataclass whose fields these JSON values are. Its values become tuples and dataclasses where its types
    say so. Other values may be there. Raises ValueError, which names the first wrong field."""
    shape = of(cls)
    given = {name: _built(hint, values[name]) for name, hint in shape.items() if name in values}
    whole = {**defaults(cls), **given}
    expect(whole, shape)
    return cls(**{name: whole.get(name) for name in shape})


def _built(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return build(hint, value)
    if origin is tuple and isinstance(value, list):
        inside = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(map(_built, inside, value)) if len(inside) == len(value) else value
    if origin is dict and isinstance(value, dict):
        return {key: _built(arguments[1], each) for key, each in value.items()}
    if origin is types.UnionType and value is not None:
        inside = [each for each in arguments if each is not types.NoneType]
        return _built(inside[0], value) if len(inside) == 1 else value
    return value


def defaults(cls: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields."""
    missing = dataclasses.MISSING
    fixed = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not missing}
    return fixed | {f.name: f.default_factory() for f in dataclasses.fields(cls) if f.default_factory is not missing}


def told(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields by name, as they are written."""
    told = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name, default in _untold(type(value)).items():  # type: ignore[arg-type]
        if told[name] == default:
            del told[name]
    return told


@cache
def _untold(cls: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls) if field.metadata == UNTOLD}


def of(cls: Any) -> Shape:
    """Return the shape that a dataclass's fields have."""
    return _of(cls)


@cache
def _of(cls: Any) -> Shape:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@cache
def _test(hint: Any) -> Callable[[Any], bool]:
    """Return a test for values of this type. JSON has lists where we have tuples, and its keys are text."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is int:
        return lambda value: type(value) is int and -WHOLE_MAX <= value < WHOLE_MAX
    if hint is float:
        return lambda value: type(value) is float or (type(value) is int and -WHOLE_MAX <= value < WHOLE_MAX)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin in (types.UnionType, typing.Union):
        any_of = [_test(each) for each in arguments]
        return lambda value: any(fits(value) for fits in any_of)
    if origin is tuple and arguments[-1:] != (...,):
        parts = [_test(each) for each in arguments]
        return lambda value: (
            isinstance(value, (list, tuple))
            and len(value) == len(parts)
            and all(fits(each) for fits, each in zip(parts, value, strict=True))
        )
    if origin in (list, tuple, Sequence):
        inside = _test(arguments[0])
        return lambda value: isinstance(value, (list, tuple)) and all(map(inside, value))
    if origin in (dict, Mapping):
        key, content = (_is_number if arguments[0] is int else _test(arguments[0])), _test(arguments[1])
        return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(content, value.values()))
    return lambda value: isinstance(value, hint)


def _is_number(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19


def described(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(described(each) for each in arguments)
    if origin is tuple and len(arguments) > 1 and set(arguments) <= {int, float}:
        return f"a list of {len(arguments)} {'whole ' * (set(arguments) == {int})}numbers"
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        inside = [described(each) for each in arguments if each is not ...]
        return f"a list of {', '.join(inside)}" if inside else "a list"
    if origin in (dict, Mapping):
        keys = "whole numbers" if arguments[0] is int else "names"
        return f"a mapping of {keys} to {described(arguments[1])}"
    if origin is Callable:
        return "a function"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(map(str, hint))
    word = _WORDS.get(None if hint is type(None) else hint)
    return word if word is not None else getattr(hint, "__name__", str(hint))
