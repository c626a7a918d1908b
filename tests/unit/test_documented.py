"""What README and docs tell a reader to import and to type exists: imports are run, command lines are parsed."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elastic_harness.agent import options
from elastic_harness.cli import COMMANDS
from elastic_harness.config import Config
from elastic_harness.gpt import command_line
from elastic_harness.names import TRAINER

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.py"))]
INLINE_IMPORT = re.compile(r"`(from elastic_harness[\w.]* import [^`]+)`")
FROM = r"from elastic_harness[\w.]* import (?:\([^)]*\)|[^\n#]*)"
IMPORT = re.compile(rf"^\s*(?:{FROM}|import elastic_harness[\w.]*)", re.M)
DOTTED = re.compile(r"\belastic_harness((?:\.\w+)+)")
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`(elastic-harness [^`]+)`")
NUMBERS = ("N", "S", "J")
NAMED_FILE = re.compile(r"(?<![\w/.-])((?:\w+/)+\w+\.py)\b")
NAMED_FUNCTION = re.compile(r"`(?:\w+/)*(\w+(?:\.(?!(?:py|md|json|yaml)\b)\w+)+)(?:\([^`]*\))?`")


class Parsed(Exception):
    """A parser took the command line; nothing of it is to be done."""


class Refused(Exception):
    """A parser did not take it."""


def places(pattern: re.Pattern[str], *, page: Path) -> Iterator[str]:
    yield from (match.group(pattern.groups) for match in pattern.finditer(page.read_text()))


def shown(page: Path) -> list[str]:
    """The command lines in a page's blocks, each with what its other lines add."""
    blocks = "\n".join(places(BLOCK, page=page)).replace("\\\n", " ")
    lines = [line.partition("  #")[0].removeprefix("$ ").strip() for line in blocks.splitlines()]
    return [line for line in lines if line.startswith("elastic-harness ")]


def variants(line: str) -> list[list[str]]:
    """The command lines that one with `[…]` and `|` stands for, with its placeholders filled in."""
    line = re.sub(r"(--[\w-]+) …", r"\1 x", line.replace("\\|", "|"))
    line = re.sub(r"\s…|…\s", " ", line).replace("…", "x").replace("[", "").replace("]", "")
    head, *others = line.split(" | ")
    found = []
    for text in (head, *(f"{' '.join(head.split()[:2])} {other}" for other in others)):
        words = shlex.split(text)[1:]
        choice = next((word for word in words if re.fullmatch(r"\w+(\|\w+)+", word)), "")
        found += [[each if word == choice else word for word in words] for each in choice.split("|")]
    return [["1" if word in NUMBERS else word for word in words] for words in found]


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers that end with what they think of the command line."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def parse_args(self: argparse.ArgumentParser, argv: Any = None, namespace: Any = None) -> NoReturn:
        _, unknown = parse_known_args(self, argv)
        if unknown:
            raise Refused(f"unknown arguments {unknown}")
        raise Parsed

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise Refused(message)

    monkeypatch.setattr(argparse.ArgumentParser, "error", error)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


def check(command: str, arguments: list[str]) -> None:
    """Raises Refused, or ConfigError, for a command line that could not be given."""
    if command not in COMMANDS:
        raise Refused(f"there is no command {command}")
    module, function, _ = COMMANDS[command]
    try:
        getattr(importlib.import_module(f"elastic_harness.{module}"), function)(arguments)
    except Parsed:
        return
    raise AssertionError(f"elastic-harness {command} did not parse its arguments")


def launched(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of `launch`, as far as nothing is started. Settings are read with the repository's own files."""
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    command = options.parse(arguments).options.command
    if command[1:3] == ("-m", TRAINER):
        command_line.read(command[3:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_import_in_a_page_works(page: Path) -> None:
    for statement in (*places(IMPORT, page=page), *places(INLINE_IMPORT, page=page)):
        exec(statement.strip(), {})  # noqa: S102 (that is the test)
    for names in places(DOTTED, page=page):
        found: Any = importlib.import_module("elastic_harness")
        for name in names.strip(".").split("."):
            if not hasattr(found, name):
                importlib.import_module(f"{found.__name__}.{name}")
            found = getattr(found, name)


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in shown(page)])
def test_every_command_line_in_a_block_is_one(
    page: Path, line: str, parsers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, *arguments in variants(line):
        if command == "launch" and "…" not in line:
            launched(arguments, monkeypatch)
        else:
            check(command, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_a_sentence_is_one(page: Path, parsers: None) -> None:
    """There a command may stand for itself, without what it needs."""
    for line in places(INLINE, page=page):
        for command, *arguments in variants(line.replace("\n", " ")):
            try:
                check(command, arguments)
            except Refused as refused:
                assert "are required" in str(refused), (line, str(refused))


def test_what_does_not_exist_is_noticed(parsers: None) -> None:
    for line in ("elastic-harness lunch x", "elastic-harness ls --no-such", "elastic-harness index mend i.bin"):
        ((command, *arguments),) = variants(line)
        with pytest.raises(Refused):
            check(command, arguments)


def test_the_built_in_model_is_found_where_one_looks_for_it() -> None:
    from elastic_harness import gpt

    assert gpt.GPT.__module__ == "elastic_harness.gpt.model" and "GPT" in dir(gpt)


def named_files() -> Iterator[tuple[Path, str]]:
    """The files of the repository that a page names by their folder. A superseded decision may name what is gone."""
    for page in PAGES:
        if "**Superseded**" not in page.read_text():
            yield from ((page, name) for name in places(NAMED_FILE, page=page))


def definitions() -> dict[str, set[str]]:
    """What the package's modules and classes define, by the name of each. Modules of one name are taken together."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(file.read_text())
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for name, body in [(file.stem, tree), *((found_class.name, found_class) for found_class in classes)]:
            nodes = list(ast.walk(body))
            there = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            there |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            found.setdefault(name, set()).update(there)
    return found


def test_every_file_that_a_page_names_exists() -> None:
    roots = (ROOT, ROOT / "src" / "elastic_harness")
    assert [(page.name, name) for page, name in named_files() if not any((r / name).exists() for r in roots)] == []


@pytest.mark.parametrize("page", [ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_function_that_a_page_names_exists(page: Path) -> None:
    defined = definitions()
    known = {section.name for section in dataclasses.fields(Config)}
    named = [name.split(".") for name in places(NAMED_FUNCTION, page=page)]
    wrong = [names for names in named if names[0] not in known and names[-1] not in defined.get(names[-2], ())]
    assert wrong == []


def test_every_module_of_the_tour_is_in_its_room() -> None:
    """The rows of the tour begin with a room. Names in them that stand for no module are few, and listed."""
    others = {"launch"}
    for room, row in re.findall(r"^\| `(\w+)/` \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M):
        folder = ROOT / "src" / "elastic_harness" / room
        there = {path.stem for path in folder.rglob("*") if "__" not in path.name}
        assert set(re.findall(r"`([a-z_]+)/?`", row)) - there - others == set(), room
