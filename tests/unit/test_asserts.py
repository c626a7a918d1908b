"""PYTHONOPTIMIZE=1 takes every `assert` out: none may guard anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_harness
from elastic_harness.checkpoint.structure import encode
from elastic_harness.comm.plan import make_plan
from elastic_harness.comm.tree import split
from elastic_harness.errors import ConfigError, Inconsistent
from elastic_harness.membership.reconcile import reconcile
from elastic_harness.membership.types import Generation

SOURCE = Path(elastic_harness.__file__).parent


def narrows(test: ast.expr) -> bool:
    """Whether an assertion says nothing but `x is not None` or `isinstance(x, T)`: what a type checker wants to hear.
    The line after it fails by itself if that is untrue."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(narrows, values))
        case ast.Compare(left=value, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return not any(isinstance(each, ast.Call) for each in ast.walk(value))
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
    return False


def guarding(text: str) -> Iterator[int]:
    """The lines of assertions that do more."""
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.Assert) and not (narrows(found.test) and found.msg is None):
            yield found.lineno


@pytest.mark.slow
def test_assertions_only_narrow_types() -> None:
    wrong = [f"{path}:{line}" for path in sorted(SOURCE.rglob("*.py")) for line in guarding(path.read_text())]
    assert not wrong, "raise an error instead (errors.Inconsistent for what is our own bug): " + ", ".join(wrong)


def test_an_assertion_that_guards_is_found() -> None:
    text = "assert x is not None and isinstance(y, int)\nassert size > 1\nassert ready()\nassert f() is not None\n"
    assert list(guarding(text)) == [2, 3, 4]


def test_what_they_guarded_is_an_error() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(Inconsistent, match="is a leaf"):
        split((3, 4))
    with pytest.raises(Inconsistent, match="do not cover 4 lanes"):
        make_plan(("a", "b"), ("", ""), 4, {"a": ((0, 2),)}, 8)
    with pytest.raises(Inconsistent, match="there are reports of"):
        reconcile(Generation(1, ("a",), True, ""), {}, born=False, lineage=0, from_step=0)
    one, two = torch.zeros(1), torch.ones(1)
    with pytest.raises(ConfigError, match=r"both called 'model\.a\.b'"):
        encode({"a.b": one, "a": {"b": two}}, "model", {})
