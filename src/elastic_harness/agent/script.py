"""Whether what is to be launched can be started at all: said in one line, before any worker is spawned."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from elastic_harness.errors import ConfigError, UserCodeError


def check_command(command: Sequence[str]) -> None:
    """Raise ConfigError if there is no such script, module or program, UserCodeError if it is no Python. Nothing of it
    is run."""
    if command[0] != sys.executable:
        if shutil.which(command[0]) is None:
            raise ConfigError(f"there is no program {command[0]!r} that can be executed; check its path and its mode")
    elif command[1] == "-m":
        _check_module(command[2])
    elif not command[1].startswith("-"):
        _check_script(Path(command[1]))


def _check_script(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"there is no script {path} (looked for in {os.getcwd()}); -m is for modules")
    if path.is_file() and path.suffix in (".py", ""):
        _parse(path)


def _parse(path: Path) -> None:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the script {path} cannot be read: {error.strerror}") from error
    if source.startswith(b"PK"):
        return  # Python runs zip files too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UserCodeError(f"{path}, line {error.lineno}: {error.msg}; nothing was started") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserCodeError(f"{path} is no Python: {error}; nothing was started") from None


def _check_module(name: str) -> None:
    """As far as that can be told without importing packages, which may do anything."""
    top, *below = name.split(".")
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        spec = importlib.util.find_spec(top) if top else None
        for part in below:
            places = None if spec is None else spec.submodule_search_locations
            spec = None if places is None else PathFinder.find_spec(f"{top}.{part}", list(places))
    except (ImportError, ValueError):
        spec = None
    except KeyError:
        return  # a folder without __init__.py: where its modules are is known once it is imported
    finally:
        sys.path.pop(0)
    if spec is None:
        raise ConfigError(f"there is no module {name!r} here or in this Python's packages ({sys.executable})")
    origin = _source(spec)
    if origin is not None:
        _parse(origin)


def _source(spec: ModuleSpec) -> Path | None:
    """The file that is run, if it is Python text."""
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    if origin is not None and spec.submodule_search_locations is not None:
        origin = origin.with_name("__main__.py")
        if not origin.exists():
            raise ConfigError(f"{spec.name!r} is a package without a __main__ module, so -m cannot run it")
    return origin if origin is not None and origin.suffix == ".py" and origin.exists() else None
