"""A function that was defined in a notebook, as a script that workers can run. No object is pickled: the script has the
source of the function and of what it uses, and imports the rest.

What has no source that means the same in another process is refused, with what to do instead.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import os
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from elastic_harness.errors import ConfigError

_LITERALS = (bool, int, float, str, bytes, type(None), tuple, list, dict, set)
_FUTURE = "from __future__ import annotations\n"
_INSTEAD = "Workers are processes of their own and get source code, not objects"


def script_of(
    function: Callable[..., object], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> str:
    """Return a script that calls the function. Raises ConfigError for a function, an argument, or something that the
    function uses, which the script cannot have."""
    _check(function)
    call = ", ".join(
        [
            *(_literal(value, f"argument {number} of {function.__name__}()") for number, value in enumerate(args)),
            *(f"{name}={_literal(value, f'{function.__name__}({name}=…)')}" for name, value in (kwargs or {}).items()),
        ]
    )
    parts = _Parts()
    name = parts.add(function.__name__, function, user=f"launch({function.__name__})")
    return "\n".join(
        [
            f'"""{name}() of a notebook, as elastic-harness wrote it for the workers."""',
            "",
            "from __future__ import annotations",
            "",
            "import sys",
            "",
            *(f"sys.path.append({path!r})" for path in _own_paths()),
            "",
            *sorted(parts.imports),
            "",
            *parts.definitions.values(),
            "",
            'if __name__ == "__main__":',
            f"    {name}({call})",
            "",
        ]
    )


class _Parts:
    """What a script is made of. Each thing is there once, after what it uses."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.definitions: dict[str, str] = {}  # by name
        self._begun: dict[str, object] = {}

    def add(self, name: str, value: Any, user: str) -> str:
        """Add what a global name stands for, and return it. `user`: what uses it, in words. Raises ConfigError."""
        if name in self._begun:
            if self._begun[name] is not value:
                raise ConfigError(f"{user} uses an older {name} than another part of the program; run the cells again")
            return name
        self._begun[name] = value
        if isinstance(value, ModuleType):
            self._import(name, value, user)
        elif (home := _home(name, value)) is not None:
            module, path = home
            first, *rest = path.split(".")
            self.imports.add(f"from {module} import {first}" + (f" as {name}" if name != first and not rest else ""))
            if rest:
                self.definitions[name] = f"{name} = {path}"
        elif isinstance(value, (FunctionType, type)):
            self._define(name, value, user)
        else:
            self.definitions[name] = f"{name} = {_literal(value, f'{name}, which {user} uses,')}"
        return name

    def _import(self, name: str, module: ModuleType, user: str) -> None:
        if not _importable(module.__name__):
            raise ConfigError(f"{user} uses {name}, a module that is in no file. {_INSTEAD}: write it to a .py file")
        same = module.__name__ == name
        self.imports.add(f"import {module.__name__}" + ("" if same else f" as {name}"))

    def _define(self, name: str, value: Any, user: str) -> None:
        if isinstance(value, FunctionType):
            _check(value, user)
        source = _source(value, user)
        (definition,) = ast.parse(source).body
        defined = getattr(definition, "name", None)
        if defined is None:
            raise ConfigError(f"{user} uses {name}, which is made by no def or class statement of its own")
        this = f"{defined}()" if isinstance(value, FunctionType) else f"class {defined}"
        inner = inspect.unwrap(value)
        known = inner.__globals__ if isinstance(inner, FunctionType) else vars(sys.modules[value.__module__])
        names = _globals_of_definition(source)
        for used in sorted(names.used - {defined}):
            if used == "get_ipython":
                raise ConfigError(f"{this} uses a magic or a ! command of the notebook; {_INSTEAD}: write it in Python")
            if used in known:
                self.add(used, known[used], this)
                self._import_below(used, known[used], definition)
            elif not hasattr(builtins, used) and used not in names.assigned:
                raise ConfigError(f"{this} uses {used}, which is not defined: run the cell that does, or import it")
        for used in sorted(names.annotations & known.keys()):  # ClassVar, say, means something to a dataclass
            if isinstance(known[used], ModuleType) or _home(used, known[used]):
                self.add(used, known[used], this)
        if self.definitions.get(defined, source) != source:
            raise ConfigError(f"{user} uses two different {defined}; run the cells again, in order")
        self.definitions[defined] = source
        if name != defined:
            self.definitions[name] = f"{name} = {defined}"

    def _import_below(self, name: str, value: Any, user: ast.stmt) -> None:
        """Import the submodules by which a module is used, as in torch.utils.data.DataLoader."""
        for node in ast.walk(user):
            path = _dotted(node).partition(".")[2] if isinstance(value, ModuleType) else ""
            if path and _dotted(node).partition(".")[0] == name and f"{value.__name__}.{path}" in sys.modules:
                self.imports.add(f"import {value.__name__}.{path}")


def _check(function: object, user: str = "") -> None:
    """Raise ConfigError if this is no function whose source is all of it."""
    shown = getattr(function, "__qualname__", repr(function))
    begin = f"{user} uses {shown}, but" if user else f"launch() was given {shown}, but"
    if not isinstance(function, FunctionType):
        raise ConfigError(
            f"{begin} that is {type(function).__name__}, not a function made by def; write a def that calls it"
        )
    inner = inspect.unwrap(function)
    if inner.__name__ == "<lambda>":
        raise ConfigError(f"{begin} a lambda has no source of its own; write it as a def in a cell")
    if inner.__closure__:
        names = ", ".join(inner.__code__.co_freevars)
        raise ConfigError(
            f"{begin} it is a closure over {names}, whose values are only in this process. {_INSTEAD}: define it "
            f"at the top of a cell, and give it {names} as arguments"
        )
    if "." in inner.__qualname__:
        outer = inner.__qualname__.partition(".")[0]
        raise ConfigError(f"{begin} it is defined within {outer}; define it at the top of a cell")
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner):
        raise ConfigError(f"{begin} a coroutine or a generator does nothing when it is called; give a plain function")


def _literal(value: Any, what: str) -> str:
    """Return Python text for a value made of numbers, strings, tuples, lists, dicts and sets. Raises ConfigError."""
    text = repr(value)
    try:
        if type(value) in _LITERALS and ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    raise ConfigError(
        f"{what} is {type(value).__module__}.{type(value).__qualname__}, made in a cell. {_INSTEAD}: make it inside "
        "the function, or give it as a number, a text, or a list or dict of them"
    )


def _home(name: str, value: Any) -> tuple[str, str] | None:
    """Return the module that a class, a function or the like can be imported from, and its name there; None if it
    was made in the notebook."""
    module_name = getattr(value, "__module__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if module is None or module_name in ("__main__", "builtins") or not _importable(str(module_name)):
        return None
    for path in (getattr(value, "__qualname__", None), getattr(value, "__name__", None), name):
        found: Any = module
        for part in path.split(".") if isinstance(path, str) else ["<nothing>"]:
            found = getattr(found, part, None)
        if found is value:
            return str(module_name), str(path)
    return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _source(value: Any, user: str) -> str:
    try:
        found = _class_source(value) if isinstance(value, type) else inspect.getsource(value)
        source = textwrap.dedent(found)
        ast.parse(source)
        return source
    except (OSError, TypeError, SyntaxError):
        raise ConfigError(
            f"{user} uses {value.__qualname__}, whose source is not known here; define it in a cell without magics, or "
            "write it to a file with %%writefile and import it"
        ) from None


def _class_source(kind: type) -> str:
    """Return the source of a class. `inspect` knows that of a notebook's classes only since Python 3.13. The cell is
    known from a method, else the newest cell counts that defines such a class."""
    methods = (each for each in vars(kind).values() if isinstance(each, FunctionType) and each.__module__ == "__main__")
    for method in methods:
        try:
            lines, _ = inspect.findsource(method)
        except OSError:
            continue
        for source in _classes("".join(lines), kind.__name__, method.__code__.co_firstlineno):
            return source
    for cell in reversed(_cells()):
        for source in _classes(cell, kind.__name__):
            return source
    return inspect.getsource(kind)


def _classes(text: str, name: str, line: int | None = None) -> Iterator[str]:
    """Yield the source of a class that stands at the top of a text, around a line of it if that is known."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            last = node.end_lineno or first
            if line is None or first <= line <= last:
                yield "".join(text.splitlines(keepends=True)[first - 1 : last])


def _cells() -> list[str]:
    """Return the cells that were run in this notebook, as Python; those that are none are left out."""
    shell: Any = getattr(builtins, "get_ipython", lambda: None)()
    cells = [] if shell is None else [shell.transform_cell(cell) for cell in shell.user_ns.get("In", [])]
    return [cell for cell in cells if _parses(cell)]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
        return True
    except (SyntaxError, ValueError):
        return False


class _Names(NamedTuple):
    """The names that a definition takes from its module, those that it assigns there, those of annotations alone."""

    used: set[str]
    assigned: set[str]
    annotations: set[str]


def _globals_of_definition(source: str) -> _Names:
    lazy, eager = (_referenced(future + source) for future in (_FUTURE, ""))
    return _Names(lazy[0], lazy[1], eager[0] - lazy[0])


def _referenced(source: str) -> tuple[set[str], set[str]]:
    """Return the names of the module that a text refers to, and those that it assigns."""
    used, assigned = set[str](), set[str]()
    tables = [symtable.symtable(source, "<cell>", "exec")]
    while tables:
        table = tables.pop()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                used |= {symbol.get_name()} if symbol.is_referenced() else set()
                assigned |= {symbol.get_name()} if symbol.is_assigned() else set()
        tables += table.get_children()
    return used, assigned


def _dotted(node: ast.AST) -> str:
    """Return "a.b.c" of such an expression, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _own_paths() -> list[str]:
    """Return the folders in which this process looks for modules, and a new Python would not: the notebook's own, and
    those added to sys.path."""
    known = {os.path.realpath(path) for path in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix)}
    known.add(os.path.realpath(os.path.join(sysconfig.get_paths()["stdlib"], "lib-dynload")))
    added = [os.path.abspath(path) for path in ("", *sys.path)]
    return [path for path in dict.fromkeys(added) if os.path.isdir(path) and os.path.realpath(path) not in known]
