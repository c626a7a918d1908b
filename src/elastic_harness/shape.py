"""What comes from outside this process, a message, a record or a file: parsed, and compared with the shape that its
reader expects, before anything is done with it.

A shape is a table of field names and types, written as type hints. A field whose type admits None may be left out.
Whole numbers fit 64 bits, so that each can be packed, compared and printed.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

Shape = Mapping[str, Any]
WHOLE_MAX = 1 << 63
_SHOWN_CHARS = 80
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "an object", None: "null"}


def parse(text: str | bytes) -> Any:
    """Return what a JSON text holds. Raises ValueError for any other text, also one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text holds. Raises ValueError for anything else."""
    value = parse(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is {_described(type(value))}, not an object")
    return value


def expect(values: Mapping[str, Any], shape: Shape) -> None:
    """Raise ValueError that names the first field which is missing or of another type. Other fields may be there."""
    for name, hint in shape.items():
        if not _test(hint)(values.get(name)):
            if name not in values:
                raise ValueError(f"{name} is missing")
            shown = repr(values[name])
            shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
            raise ValueError(f"{name} is {shown}; it must be {_described(hint)}")


@cache
def of(cls: Any) -> Shape:
    """Return the shape that a dataclass's fields have."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@cache
def _test(hint: Any) -> Callable[[Any], bool]:
    """Whether a value is of this type. JSON has lists where we have tuples, and keys that are text."""
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


def _described(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_described(each) for each in arguments)
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        inside = [_described(each) for each in arguments if each is not ...]
        return f"a list of {', '.join(inside)}" if inside else "a list"
    if origin in (dict, Mapping):
        return f"an object whose values are {_described(arguments[1])}"
    word = _WORDS.get(None if hint is type(None) else hint)
    return word if word is not None else getattr(hint, "__name__", str(hint))
