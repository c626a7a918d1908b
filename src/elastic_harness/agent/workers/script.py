"""Whether the command of a launch can be started at all. An error is one line, before any worker is spawned."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from elastic_harness.errors import ConfigError, UserCodeError

_CHANGES_THE_SEARCH = (b"sys.path", b"meta_path", b"path_hooks", b"addsitedir", b"sys.modules")


def check_command(command: Sequence[str]) -> None:
    """Raise ConfigError if there is no such script, module or program, UserCodeError if it is not Python. Nothing is
    run."""
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
    if path.is_file() and path.suffix in (".py", "") and (source := _parse(path)):
        _check_imports(source, path, path.resolve().parent)


def _parse(path: Path) -> bytes:
    """Return the source of a script that is Python, b"" of an archive. Raises as `check_command`."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the script {path} cannot be read: {error.strerror}") from error
    if source.startswith(b"PK"):
        return b""  # Python runs zip files too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UserCodeError(f"{path}, line {error.lineno}: {error.msg}; nothing was started") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserCodeError(f"{path} is no Python: {error}; nothing was started") from None
    return source


def _check_imports(source: bytes, path: Path, folder: Path) -> None:
    """Raise UserCodeError if a script imports, at its top, a module that does not exist. `folder`: where Python looks
    first. Nothing is imported. A module of the user's own, and a script that touches sys.path, may change where modules
    are found. So imports after it are not judged."""
    if any(word in source for word in _CHANGES_THE_SEARCH):
        return
    for statement in ast.parse(source).body:
        for name in _imported(statement):
            if name == "":
                return
            spec = _find(name, folder)
            if spec is None:
                raise UserCodeError(
                    f"{path}, line {statement.lineno}: there is no module {name!r} in this Python ({sys.executable}); "
                    "install it there, or launch with the Python that has it; nothing was started"
                )
            if not _installed(spec):
                return


def _imported(statement: ast.stmt) -> list[str]:
    """Return the first parts of the names that a statement imports; "" for a relative import."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return ["" if statement.level else (statement.module or "").partition(".")[0]]
    return []


def _find(name: str, folder: Path) -> ModuleSpec | None:
    """Return where a module is that is in no package; it is not imported."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return sys.modules[name].__spec__ if name in sys.modules else None
    finally:
        sys.path.pop(0)


def _installed(spec: ModuleSpec) -> bool:
    """Return whether a module is of the standard library, of an installed package, or of this one."""
    places = (spec.origin or "", *(spec.submodule_search_locations or ()))
    known = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    known += (str(Path(__file__).parents[2]),)
    return spec.origin in ("built-in", "frozen") or any(place.startswith(known) for place in places)


def failed_to_import(tail: Sequence[str]) -> str:
    """Return the error of a worker that ended because its program could not be imported, from the end of its log, else
    "". Then no function of the program had been called, and another start would end in the same way."""
    error = tail[-1] if tail else ""
    frames = [line for line in tail if line.lstrip().startswith('File "') and '"<frozen' not in line]
    at_the_top = bool(frames) and all(line.endswith("in <module>") for line in frames)
    return error if at_the_top and error.startswith(("ModuleNotFoundError:", "ImportError:")) else ""


def _check_module(name: str) -> None:
    """Raise ConfigError if a module cannot be run, as far as that shows without importing packages, which may do
    anything."""
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
    source = b"" if origin is None else _parse(origin)
    if origin is not None and source and not below and origin.name != "__main__.py":
        _check_imports(source, origin, Path.cwd())


def _source(spec: ModuleSpec) -> Path | None:
    """Return the file that is run, if it is Python text."""
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    if origin is not None and spec.submodule_search_locations is not None:
        origin = origin.with_name("__main__.py")
        if not origin.exists():
            raise ConfigError(f"{spec.name!r} is a package without a __main__ module, so -m cannot run it")
    return origin if origin is not None and origin.suffix == ".py" and origin.exists() else None
