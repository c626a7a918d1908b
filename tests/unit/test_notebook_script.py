"""What a notebook's function becomes for the workers: the script does what the function does, or it is refused."""

from __future__ import annotations

import functools
import linecache
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elastic_harness.errors import ConfigError
from elastic_harness.notebook.script import script_of

CELLS = count()
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs cells one after another, as a kernel does, and returns what they have defined."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(*cells: str) -> dict[str, Any]:
        for cell in cells:
            name = f"<cell {next(CELLS)}>"
            monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
            exec(compile(cell, name, "exec", dont_inherit=True), vars(main))  # noqa: S102 (that is what a kernel does)
        return vars(main)

    return run


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_the_function_brings_all_that_it_uses(notebook: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("def triple(x): return 3 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    cells = notebook(
        "import collections.abc, functools as ft, os.path\nfrom collections import OrderedDict as Ordered",
        "from beside import triple\nSIZE = {'width': [1, 2.5], 'name': 'it\\'s'}\nseen = 0",
        "def decorated(function):\n    @ft.wraps(function)\n    def call(*args):\n        return function(*args) + 1\n"
        "    return call",
        "class Base:\n    offset = 10\n    def unused(self): pass\n\n"
        "class Net(Base):\n    def __call__(self, x):\n        return x + self.offset",
        "@decorated\ndef helper(x):\n    return again(x - 1) if x else Net()(0)\n\ndef again(x):\n    return helper(x)",
        "alias = helper",
        "def train(x: 'Nowhere', *, name=SIZE['name']):\n"
        "    global seen\n    seen += 1\n    own = [len(k) for k in SIZE]\n"
        "    print(x, name, own, alias(2), triple(seen), list(Ordered(a=1)), os.path.basename('a/b'),\n"
        "          isinstance([], collections.abc.Sequence))",
    )
    script = script_of(cells["train"], (("a", None, True),), {"name": "n"})
    assert printed(script) == "('a', None, True) n [5, 4] 13 3 ['a'] b True\n"


def test_a_class_is_the_one_of_its_cell_even_if_another_has_its_name(notebook: Run) -> None:
    first = notebook("class Net:\n    def who(self):\n        return 1")["Net"]
    notebook("class Net:\n    def who(self):\n        return 2")
    cells = notebook("def train():\n    print(Net().who())")
    assert printed(script_of(cells["train"])) == "2\n"
    cells["Net"] = first
    assert printed(script_of(cells["train"])) == "1\n"


def test_a_function_of_a_module_is_imported(notebook: Run) -> None:
    cells = notebook("from platform import machine as train")
    script = script_of(cells["train"])
    assert "from platform import machine" in script and "def " not in script
    assert printed(script) == ""


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("train = lambda: 1", "a lambda has no source of its own; write it as a def"),
        ("def make(n):\n    def inner(): return n\n    return inner\ntrain = make(1)", "a closure over n"),
        (
            "def make():\n    def inner(): return 1\n    return inner\ntrain = make()",
            "defined within make; define it at",
        ),
        ("class A:\n    def go(self): pass\ntrain = A().go", "that is method, not a function made by def"),
        ("import functools\ndef f(x): pass\ntrain = functools.partial(f, 1)", "that is partial, not a function"),
        ("async def train(): pass", "a coroutine or a generator does nothing when it is called"),
        (
            "model = object()\ndef train(): return model",
            "model, which train() uses, is builtins.object, made in a cell",
        ),
        (
            "from decimal import Decimal\nw = Decimal(1)\ndef train(): return w",
            "w, which train() uses, is decimal.Decimal",
        ),
        ("f = lambda x: x\ndef train(): return f(1)", "train() uses <lambda>, but a lambda has no source"),
        ("def train(): return modle", "train() uses modle, which is not defined"),
        ("def get_ipython(): pass\ndef train(): get_ipython().system('ls')", "a magic or a ! command"),
        ("import types\nm = types.ModuleType('nofile')\ndef train(): return m.x", "a module that is in no file"),
        ("exec('def train(): pass')", "whose source is not known here"),
        ("big = float('inf')\ndef train(): return big", "big, which train() uses, is builtins.float"),
    ],
)
def test_what_cannot_be_had_in_another_process_is_refused(notebook: Run, cell: str, said: str) -> None:
    cells = notebook(cell)
    with pytest.raises(ConfigError) as refused:
        script_of(cells["train"])
    assert said in str(refused.value)


def test_arguments_are_values(notebook: Run) -> None:
    cells = notebook("def train(*values): print(*values)")
    assert printed(script_of(cells["train"], (1, -2.5, "x\n", {"a": [None]}))) == "1 -2.5 x\n {'a': [None]}\n"
    with pytest.raises(ConfigError, match=r"argument 0 of train\(\) is functools.partial"):
        script_of(cells["train"], (functools.partial(print),))
