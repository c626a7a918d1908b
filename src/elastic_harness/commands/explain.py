"""`elastic-harness explain`: what a code means, or the story of a run: the first cause first, what was done, what it
cost, and what to type next. It works offline, on a run that is going on, and on folders that are damaged in part."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.errors import EXIT_SUCCESS, ConfigError
from elastic_harness.incidents.code import FAMILIES, Code
from elastic_harness.incidents.table import TABLE
from elastic_harness.report.words import (
    code_in_words,
    failure_in_words,
    of_code,
    of_failure,
    of_tale,
    paragraph,
    place,
    tale_in_words,
)
from elastic_harness.runs import episodes, named
from elastic_harness.runs import folder as folders
from elastic_harness.runs.episodes import Tale, TimedEvent
from elastic_harness.runs.events import EVENTS, passed_over, read_events

_CODE = re.compile(r"(?:EH-?)?([A-Z]\d{3})", re.IGNORECASE)
_WRITTEN_CODE = re.compile(r"EH-[A-Z]\d{3}")
_MEMBER_FILE = re.compile(r"(?:worker-\d+-)?(.*?w\d+-\d+)(?:-\d{8}-\d{6})?\.(?:log|txt)")


def main(argv: Sequence[str]) -> int:
    """Explain what was named."""
    parser = argparse.ArgumentParser(prog="elastic-harness explain", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "what",
        nargs="?",
        metavar="CODE|RUN|FILE",
        help="a code (EH-W101); a run folder or an id below runs/; or a file: an event log, an incident as JSON, a "
        "worker's log or the stacks of a hang in a run's folder, or any text with codes in it",
    )
    parser.add_argument("--list", action="store_true", help="list all codes")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    given = parser.parse_args(list(argv))
    if given.list == (given.what is not None):
        raise ConfigError("name one thing to explain, CODE, RUN or FILE; or give --list for all codes")
    if given.list:
        print(json.dumps([of_code(code) for code in TABLE.values()]) if given.json else "\n".join(_listed()))
        return EXIT_SUCCESS
    path = Path(given.what)
    if not path.exists() and (code := code_named(given.what)) is not None:
        print(json.dumps(of_code(code)) if given.json else "\n".join(code_in_words(code)))
    elif path.is_file():
        _explain_file(path, as_json=given.json)
    else:
        _explain_run(given.what, as_json=given.json)
    return EXIT_SUCCESS


# ---- a code


def code_named(text: str) -> Code | None:
    """Return the code that a text is; None if it does not look like one. Raises ConfigError for one that is not
    there."""
    match = _CODE.fullmatch(text)
    if match is None:
        return None
    name = f"EH-{match[1].upper()}"
    if name not in TABLE:
        near = [code for code in TABLE if code[3] == name[3]]
        hint = f"there are {near[0]} to {near[-1]}" if near else f"the families are {', '.join(FAMILIES)}"
        raise ConfigError(f"there is no code {name}; {hint}; `elastic-harness explain --list` shows all")
    return TABLE[name]


def _listed() -> Iterator[str]:
    for letter, title in FAMILIES.items():
        yield title
        for code in TABLE.values():
            if code.family == letter:
                yield f"  {code.id}  {code.name:<46}  {code.domain:<14}  again: {code.retry}"


# ---- a run


def read_logs(run: str | Path, damaged: list[str]) -> tuple[list[Path], Iterator[TimedEvent]]:
    """Return the folders of a run and the events of its nodes. What is damaged is added to `damaged`. Raises
    ConfigError if there is no log."""
    paths = named.of_run(run, EVENTS)
    logs = [path / EVENTS for path in paths if (path / EVENTS).is_file()]
    if not logs:
        there = ", ".join(sorted(each.name for each in paths[0].iterdir())[:8]) if paths[0].is_dir() else "no folder"
        raise ConfigError(
            f"there is no {EVENTS} in {paths[0]} (there is: {there or 'nothing'}); name the folder of a run, which "
            "`elastic-harness ls` lists"
        )
    nodes = {path.parent.name.partition("@")[2]: read_events(path, damaged.append) for path in logs}
    return paths, episodes.in_order(nodes, damaged.append)


def check_told(run: str | Path, tale: Tale, damaged: Sequence[str]) -> None:
    """Raise ConfigError if a run's logs tell nothing."""
    if tale.newest_at is None:
        why = f"; {passed_over(damaged)}" if damaged else ""
        raise ConfigError(f"the log of {run} has no event yet, so there is nothing to tell{why}")


def _read_tale(run: str | Path) -> tuple[list[Path], Tale, list[str]]:
    damaged: list[str] = []
    paths, events = read_logs(run, damaged)
    tale = episodes.tell(events, damaged.append)
    check_told(run, tale, damaged)
    return paths, tale, damaged


def _explain_run(run: str, *, as_json: bool) -> None:
    paths, tale, damaged = _read_tale(run)
    live = any(folders.locked(path) for path in paths)
    if as_json:
        print(json.dumps(of_tale(run, paths, tale, damaged, live=live)))
        return
    print("\n".join(tale_in_words(run, paths, tale, damaged, live=live)))


# ---- a file


def _explain_file(path: Path, *, as_json: bool) -> None:
    """Explain an event log, an incident as JSON, a file of a run about one of its workers, or a text with codes."""
    member = _MEMBER_FILE.fullmatch(path.name)
    run = path.resolve().parent.parent
    if member is not None and (run / EVENTS).is_file():
        _explain_member(run, member[1], as_json=as_json)
        return
    damaged: list[str] = []
    events = _events_in(path, damaged)
    if events:
        tale = episodes.tell(episodes.in_order({"": events}, damaged.append), damaged.append)
        if tale.newest_at is not None:
            told = (str(path), [path], tale, damaged)
            live = path.name == EVENTS and folders.locked(path.parent)
            print(json.dumps(of_tale(*told, live=live)) if as_json else "\n".join(tale_in_words(*told, live=live)))
            return
    found = [code for name in dict.fromkeys(_WRITTEN_CODE.findall(_text(path))) if (code := TABLE.get(name))]
    if not found:
        raise ConfigError(
            f"{path} has no event and no code in it; name an event log ({EVENTS}), an incident as JSON, a file in the "
            "logs/ or hangs/ of a run, or any text with a code such as EH-W101"
        )
    if as_json:
        print(json.dumps({"file": str(path), "codes": [of_code(code) for code in found]}))
        return
    print("\n\n".join("\n".join(code_in_words(code)) for code in found))


def _explain_member(run: Path, member: str, *, as_json: bool) -> None:
    """Explain what befell one worker."""
    _, tale, _ = _read_tale(run)
    about = [f for e in tale.episodes for f in episodes.every(e.failures) if _is(f.member, member)]
    if not about:
        raise ConfigError(f"nothing is told of a failure of {member} in {run / EVENTS}; see its end with: "
                          f"elastic-harness logs {run} {member.rpartition('.')[2]}")  # fmt: skip
    if as_json:
        print(json.dumps({"run": str(run), "failures": [of_failure(each, str(run)) for each in about]}))
        return
    for failure in about:
        print("\n".join(failure_in_words(failure)))
        print("\n".join(paragraph("next", failure.code.what_next(place(failure, str(run))), "  ")))


def _is(member: str | None, name: str) -> bool:
    """Whether a file's name is that of a member, in which a dot stands for the slash."""
    return member is not None and name in (member.replace("/", "."), member.rpartition("/")[2])


def _events_in(path: Path, damaged: list[str]) -> list[Mapping[str, Any]]:
    """Return the events of a file: lines of JSON, or one object."""
    try:
        whole = json.loads(_text(path))
    except ValueError:
        return list(read_events(path, damaged.append))
    if isinstance(whole, dict) and (isinstance(whole.get("event"), str) or whole.get("code") in TABLE):
        return [{"event": "incident", "t": path.stat().st_mtime, **whole}]
    return []


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
