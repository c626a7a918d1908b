"""Typed sections of settings: dataclasses whose fields are checked and converted when they are built."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from elastic_harness import own_loop, shape
from elastic_harness.errors import ConfigError
from elastic_harness.setting_aliases import own_names


class _Named(type):
    """Has a section take its settings under the names of the field too."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        section = getattr(cls, "section", "")
        return super().__call__(*values, **(own_names(section, settings) if section else settings))


class Section(metaclass=_Named):
    """Checks and converts the types of all fields, then the section's own rules (``check``)."""

    section: ClassVar[str] = ""

    def __new__(cls, *_: Any, **settings: Any) -> Section:
        """Refuse settings that are in another section now, and say where."""
        if moved := own_loop.refusals(f"{cls.section}.", settings):
            raise ConfigError(" ".join(moved))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = shape.of(type(self))
        for name, hint in hints.items():
            value = convert(self._key(name), getattr(self, name), hint)
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a value is out of its range."""

    def _key(self, name: str) -> str:
        return f"{self.section}.{name}" if self.section else name

    def _require(self, holds: bool, name: str, requirement: str, advice: str = "") -> None:
        if not holds:
            raise setting_error(self._key(name), getattr(self, name), requirement, advice)

    def _at_least(self, minimum: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or value >= minimum, name, f"must be at least {minimum}")

    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or value > 0, name, "must be greater than 0")


def plain(value: Any) -> Any:
    """Return the value with lists in place of tuples, as YAML and JSON have them."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def setting_error(key: str, value: object, requirement: str, advice: str = "") -> ConfigError:
    """Return the error for one setting: its name, its value, what is required, and what to do."""
    shown = list(value) if isinstance(value, tuple) else value
    return ConfigError(f"{key} is {shown!r}, but {requirement}" + (f"; {advice}" if advice else "") + ".")


def nearest_multiple(value: int, factor: int) -> int:
    """Return the positive multiple of ``factor`` closest to ``value``, for advice."""
    return max(1, round(value / factor)) * factor


def section_class(hint: Any) -> type[Any] | None:
    """Return the section that a field of this type holds; None for a plain setting."""
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


def convert(key: str, value: Any, hint: Any) -> Any:
    """Return the value as its field's type. Raises ConfigError if it is of another kind."""
    ok, converted = fit(value, hint)
    if not ok:
        raise setting_error(key, value, f"must be {shape.described(hint)}")
    return converted


def fit(value: Any, hint: Any) -> tuple[bool, Any]:
    """Return whether the value is of this type, and the value converted to it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        fits = (fit(value, a) for a in args)
        return next((f for f in fits if f[0]), (False, value))
    if origin is Literal:
        return value in args, value
    if origin is tuple:
        if args[-1] is ... and isinstance(value, (list, tuple)):
            args = (args[0],) * len(value)
        if not isinstance(value, (list, tuple)) or len(value) != len(args):
            return False, value
        parts = [fit(v, a) for v, a in zip(value, args, strict=True)]
        return all(ok for ok, _ in parts), tuple(v for _, v in parts)
    if origin is dict:
        if not isinstance(value, dict):
            return False, value
        fitted = {key: fit(v, args[1]) for key, v in value.items()}
        all_fit = all(isinstance(k, int | str) and ok for k, (ok, _) in fitted.items())
        return all_fit, {str(k): v for k, (_, v) in fitted.items()}
    if origin is Callable:
        return callable(value), value
    if hint is float:
        return _fit_float(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, hint), value


def _fit_float(value: Any) -> tuple[bool, Any]:
    """Do as `fit`, for a number. YAML 1.1 reads ``3e-4`` as text (it wants ``3.0e-4``), so text that spells a number
    counts as one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False, value
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return False, value
    return math.isfinite(number), number
