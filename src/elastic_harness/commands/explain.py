"""`elastic-harness explain`: what a code means, or the story of a run: the first cause first, what was done, what it
cost, and what to type next. It works offline, on a run that is going on, and on folders that are damaged in part."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.errors import EXIT_SUCCESS, ConfigError
from elastic_harness.incidents.code import FAMILIES, Code
from elastic_harness.incidents.page import explained
from elastic_harness.incidents.table import CUT_OFF, TABLE
from elastic_harness.runs import episodes, named
from elastic_harness.runs import folder as folders
from elastic_harness.runs.episodes import Episode, Failure, Tale
from elastic_harness.runs.events import EVENTS, passed_over, read_events

WIDTH = 118
EVIDENCE_SHOWN = 6  # lines for each failure
_CODE = re.compile(r"(?:EH-?)?([A-Z]\d{3})", re.IGNORECASE)
_COMMAND = re.compile(r"`[^`]*`")
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


def of_code(code: Code) -> dict[str, Any]:
    """Return a row for --json."""
    row = {name: value for name, value in vars(code).items() if name not in ("id", "next")}
    return {"code": code.id, **row, "next": code.what_next()}


def code_in_words(code: Code) -> Iterator[str]:
    """Yield a row as lines."""
    yield f"{code.id}  {code.name}"
    yield ""
    for heading, said in (*explained(code), ("next", code.what_next())):
        yield from paragraph(heading, said)


def paragraph(heading: str, said: Sequence[str], indent: str = "") -> Iterator[str]:
    """Yield sentences as lines behind a heading."""
    for number, sentence in enumerate(said):
        mark = "- " if len(said) > 1 else ""
        kept = _COMMAND.sub(lambda match: match[0].replace(" ", "\0"), sentence)  # on one line, to be copied
        wrapped = textwrap.wrap(
            mark + kept,
            WIDTH - 11 - len(indent),
            subsequent_indent=" " * len(mark),
            break_on_hyphens=False,
            break_long_words=False,
        )
        for index, line in enumerate(wrapped or [""]):
            yield f"{indent}{heading if not number and not index else '':<9}  {line}".replace("\0", " ").rstrip()


def _listed() -> Iterator[str]:
    for letter, title in FAMILIES.items():
        yield title
        for code in TABLE.values():
            if code.family == letter:
                yield f"  {code.id}  {code.name:<46}  {code.domain:<14}  again: {code.retry}"


# ---- a run


def read_tale(run: str | Path) -> tuple[list[Path], Tale, list[str]]:
    """Return the folders of a run, what its logs tell, and what of them is damaged. Raises ConfigError if they tell
    nothing."""
    paths = named.of_run(run, EVENTS)
    logs = [path / EVENTS for path in paths if (path / EVENTS).is_file()]
    if not logs:
        there = ", ".join(sorted(each.name for each in paths[0].iterdir())[:8]) if paths[0].is_dir() else "no folder"
        raise ConfigError(
            f"there is no {EVENTS} in {paths[0]} (there is: {there or 'nothing'}); name the folder of a run, which "
            "`elastic-harness ls` lists, or a code such as EH-W101"
        )
    damaged: list[str] = []
    nodes = {path.parent.name.partition("@")[2]: read_events(path, damaged.append) for path in logs}
    tale = episodes.tell(nodes, damaged.append)
    if tale.newest_at is None:
        why = f"; {passed_over(damaged)}" if damaged else ""
        raise ConfigError(f"{logs[0]} has no event yet, so there is nothing to tell{why}")
    return paths, tale, damaged


def _explain_run(run: str, *, as_json: bool) -> None:
    paths, tale, damaged = read_tale(run)
    live = any(folders.locked(path) for path in paths)
    if as_json:
        print(json.dumps(of_tale(run, paths, tale, damaged, live=live)))
        return
    print("\n".join(tale_in_words(run, paths, tale, damaged, live=live)))


def of_tale(run: str, paths: Sequence[Path], tale: Tale, damaged: Sequence[str], *, live: bool) -> dict[str, Any]:
    """Return a run's story for --json."""
    return {
        "run": run,
        "folders": [str(path) for path in paths],
        "state": state(tale, live=live),
        "started": tale.started_at,
        "newest": tale.newest_at,
        "steps": len(tale.commits),
        "healthy_step_s": tale.healthy_s,
        "episodes": [_of_episode(each, run) for each in tale.episodes],
        "code": ended_by.code.id if (ended_by := cause_of_end(tale, live=live)) else None,
        "next": what_next(run, tale, live=live),
        "damaged": list(damaged),
    }


def _of_episode(episode: Episode, run: str) -> dict[str, Any]:
    row = {name: value for name, value in vars(episode).items() if name != "failures"}
    return {**row, "failures": [_of_failure(each, run) for each in episode.failures]}


def _of_failure(failure: Failure, run: str) -> dict[str, Any]:
    code = failure.code
    row = {name: value for name, value in vars(failure).items() if name not in ("code", "consequences", "peers")}
    return {
        "code": code.id,
        "name": code.name,
        "domain": code.domain,
        "retry": code.retry,
        **row,
        "inferred": code.inferred,
        "next": code.what_next(_place(failure, run)),
        "consequences": [_of_failure(each, run) for each in failure.consequences],
    }


def state(tale: Tale, *, live: bool) -> str:
    """Return what has become of a run: finished, failed, stopped, going on, or cut off."""
    if live:
        return "going on"
    return "cut off" if tale.finished is None else str(tale.finished.get("status"))


def cause_of_end(tale: Tale, *, live: bool) -> Failure | None:
    """Return the first cause in the newest episode, if nothing was committed after it; None if the run did what it was
    to do."""
    newest = tale.episodes[-1] if tale.episodes else None
    if newest is None or state(tale, live=live) in ("finished", "stopped"):
        return None
    ended = any(failure.event == "run_finished" for failure in episodes.every(newest.failures))
    return newest.first if newest.over_at is None or ended else None


def what_next(run: str, tale: Tale, *, live: bool) -> list[str]:
    """Return what to type next."""
    now = state(tale, live=live)
    cause = cause_of_end(tale, live=live)
    if cause is not None:
        return cause.code.what_next(_place(cause, run))
    if now == "cut off":
        return [f"go on from the newest checkpoint: `elastic-harness resume {run}`", *CUT_OFF.what_next({"run": run})]
    if now == "going on":
        return [f"see who is there: `elastic-harness status {run}`"]
    if now == "stopped":
        return [f"go on: `elastic-harness resume {run}`"]
    return [f"prove that no sample was lost: `elastic-harness verify {run}`"]


def _place(failure: Failure, run: str) -> dict[str, object]:
    log = failure.log or None
    return {"run": run, "member": failure.member, "step": failure.step, "slot": failure.slot, "log": log}


def tale_in_words(run: str, paths: Sequence[Path], tale: Tale, damaged: Sequence[str], *, live: bool) -> Iterator[str]:
    """Yield a run's story as lines."""
    assert tale.newest_at is not None
    nodes = f" on {len(paths)} nodes" if len(paths) > 1 else ""
    launches = f", {tale.launches} launches" if tale.launches > 1 else ""
    step_s = f", {tale.healthy_s:.3g} s each" if tale.healthy_s else ""
    yield f"run {run}{nodes}: {state(tale, live=live)}; {len(tale.commits)} steps committed{step_s}{launches}"
    if tale.started_at is not None:
        yield f"from {_moment(tale.started_at)} to {_moment(tale.newest_at)} ({tale.newest_at - tale.started_at:.1f} s)"
    if damaged:
        yield from paragraph("log", [passed_over(damaged)])
    yield ""
    if not tale.episodes:
        yield "Nothing went wrong."
    for episode in tale.episodes:
        for failure in episode.failures:
            yield from _failure_in_words(failure, "")
        yield from paragraph("cost", [_cost(episode)], "  ")
        yield ""
    yield from paragraph("the end", [_end(tale, live=live)])
    yield from paragraph("next", what_next(run, tale, live=live))


def _failure_in_words(failure: Failure, indent: str) -> Iterator[str]:
    where = f", step {failure.step}" if failure.step is not None else ""
    where += f", slot {failure.slot}" if failure.slot is not None else ""
    where += f", node {failure.node}" if failure.node else ""
    times = f" ({failure.times} times)" if failure.times > 1 else ""
    mark = "└ " if indent else ""
    yield f"{indent}{mark}{_moment(failure.t)[11:]}  {failure.code.id} {failure.code.name}{where}{times}"
    inner = indent + "  " * (1 + bool(indent))
    yield from paragraph("what", [printable(failure.what)], inner)
    evidence = [printable(line.strip()) for line in failure.evidence]
    more = [f"and {len(evidence) - EVIDENCE_SHOWN} lines more"] if len(evidence) > EVIDENCE_SHOWN else []
    yield from paragraph("evidence", [*evidence[:EVIDENCE_SHOWN], *more] or [failure.code.evidence], inner)
    if not indent:
        yield from paragraph("inferred", [failure.code.inferred], inner)
    yield from paragraph("done", [printable(failure.done or failure.code.done)], inner)
    for each in failure.consequences:
        yield from _failure_in_words(each, inner)


def _cost(episode: Episode) -> str:
    said = []
    if episode.restored_version is not None:
        said.append(f"all members went back to version {episode.restored_version}")
    if episode.redone_steps:
        said.append(f"{episode.redone_steps} steps were computed and committed once more")
    if episode.over_step is None:
        said.append("no new step was committed after it")
    elif episode.cost_s is not None:
        after_s = (episode.over_at or 0.0) - episode.began_at
        said.append(
            f"{episode.cost_s:.2f} s: step {episode.over_step} came {after_s:.2f} s after the failure was noticed, and "
            "so much later than without it"
        )
    elif episode.interrupted:
        said.append("not known: it is not known how long a step took before")
    else:
        said.append("no time: nobody waited for it")
    return "; ".join(said)


def _end(tale: Tale, *, live: bool) -> str:
    now = state(tale, live=live)
    newest = tale.commits[-1] if tale.commits else None
    so_far = f"step {newest.step} was committed at {_moment(newest.t)[11:]}" if newest else "no step was committed"
    if now == "going on":
        return f"the run goes on; {so_far}"
    if tale.finished is None:
        ends = f"the log ends at {_moment(tale.newest_at or 0.0)[11:]} without a last word"
        return f"{so_far}, and {ends}: {CUT_OFF.meaning}"
    message, code = tale.finished.get("message") or so_far, tale.finished.get("exit_code")
    return f"{now} with exit code {code}: {printable(str(message))}"


def printable(text: str) -> str:
    """Return a text from a log without what would change the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _moment(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) + f".{int(t % 1 * 10)}"


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
        tale = episodes.tell({"": events}, damaged.append)
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
    _, tale, _ = read_tale(run)
    about = [f for e in tale.episodes for f in episodes.every(e.failures) if _is(f.member, member)]
    if not about:
        raise ConfigError(f"nothing is told of a failure of {member} in {run / EVENTS}; see its end with: "
                          f"elastic-harness logs {run} {member.rpartition('.')[2]}")  # fmt: skip
    if as_json:
        print(json.dumps({"run": str(run), "failures": [_of_failure(each, str(run)) for each in about]}))
        return
    for failure in about:
        print("\n".join(_failure_in_words(failure, "")))
        print("\n".join(paragraph("next", failure.code.what_next(_place(failure, str(run))), "  ")))


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
