"""`elastic-harness explain`: what a code means. It works offline."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from elastic_harness.errors import EXIT_SUCCESS, ConfigError
from elastic_harness.incidents.code import FAMILIES, Code
from elastic_harness.incidents.page import explained
from elastic_harness.incidents.table import TABLE

WIDTH = 110
_CODE = re.compile(r"(?:EH-?)?([A-Z]\d{3})", re.IGNORECASE)


def main(argv: Sequence[str]) -> int:
    """Explain what was named."""
    parser = argparse.ArgumentParser(prog="elastic-harness explain", description=__doc__, allow_abbrev=False)
    parser.add_argument("what", nargs="?", metavar="CODE", help="a code (EH-W101)")
    parser.add_argument("--list", action="store_true", help="list all codes")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    given = parser.parse_args(list(argv))
    if given.list == (given.what is not None):
        raise ConfigError("name one thing to explain, CODE, or give --list for all codes")
    if given.list:
        _list(as_json=given.json)
        return EXIT_SUCCESS
    code = code_named(given.what)
    if code is None:
        raise ConfigError(f"{given.what!r} is no code; a code looks like EH-W101, and --list shows all")
    print(json.dumps(as_object(code)) if given.json else in_words(code))
    return EXIT_SUCCESS


def code_named(text: str) -> Code | None:
    """Return the code that a text is; None if it does not look like one. Raises ConfigError for one that is not
    there."""
    match = _CODE.fullmatch(text)
    if match is None:
        return None
    name = f"EH-{match[1].upper()}"
    if name not in TABLE:
        family = FAMILIES.get(name[3])
        near = [code for code in TABLE if code[3] == name[3]] if family else []
        hint = f"of {family} there are {near[0]} to {near[-1]}" if near else f"the families are {', '.join(FAMILIES)}"
        raise ConfigError(f"there is no code {name}; {hint}; `elastic-harness explain --list` shows all")
    return TABLE[name]


def as_object(code: Code) -> dict[str, Any]:
    """Return a row for --json."""
    return {
        "code": code.id,
        **{k: v for k, v in vars(code).items() if k not in ("id", "next")},
        "next": code.what_next(),
    }


def in_words(code: Code) -> str:
    """Return a row as text."""
    rows = [*explained(code), ("next", code.what_next())]
    lines = [f"{code.id}  {code.name}", ""]
    for heading, said in rows:
        lines += paragraph(heading, said if len(said) == 1 else [f"- {each}" for each in said])
    return "\n".join(lines)


def paragraph(heading: str, said: Iterable[str], indent: str = "") -> list[str]:
    """Return sentences as lines behind a heading."""
    lines = [
        line for each in said for line in textwrap.wrap(each, WIDTH - 12, subsequent_indent="  " * (each[:1] == "-"))
    ]
    return [f"{indent}{heading if not index else '':<10}  {line}" for index, line in enumerate(lines)]


def _list(*, as_json: bool) -> None:
    if as_json:
        print(json.dumps([as_object(code) for code in TABLE.values()]))
        return
    for letter, title in FAMILIES.items():
        print(title)
        for code in TABLE.values():
            if code.family == letter:
                print(f"  {code.id}  {code.name:<46}  {code.domain:<14}  again: {code.retry}")
