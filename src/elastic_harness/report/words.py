"""A code, and the story of a run, in words and as JSON."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.incidents.code import Code
from elastic_harness.incidents.page import explained
from elastic_harness.incidents.table import CUT_OFF, SLOT_RETRIED
from elastic_harness.runs import episodes
from elastic_harness.runs.episodes import Episode, Failure, Tale
from elastic_harness.runs.events import passed_over

WIDTH = 118
EVIDENCE_SHOWN = 6  # lines for each failure
_COMMAND = re.compile(r"`[^`]*`")

# ---- a code


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


# ---- a run


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
    return {**row, "failures": [of_failure(each, run) for each in episode.failures]}


def of_failure(failure: Failure, run: str) -> dict[str, Any]:
    """Return a failure, with all that followed from it, for --json."""
    code = failure.code
    left_out = ("code", "consequences", "peers", "reason")
    row = {name: value for name, value in vars(failure).items() if name not in left_out}
    return {
        "code": code.id,
        "name": code.name,
        "domain": code.domain,
        "retry": code.retry,
        **row,
        "inferred": code.inferred,
        "next": code.what_next(place(failure, run)),
        "consequences": [of_failure(each, run) for each in failure.consequences],
    }


def state(tale: Tale, *, live: bool) -> str:
    """Return what has become of a run: finished, failed, stopped, going on, or cut off."""
    if live:
        return "going on"
    return "cut off" if tale.finished is None else str(tale.finished.get("status"))


def cause_of_end(tale: Tale, *, live: bool) -> Failure | None:
    """Return the first cause in the newest episode, if nothing was committed after it; None if the run did what it was
    to do, or if nothing is told that could have ended it."""
    newest = tale.episodes[-1] if tale.episodes else None
    if newest is None or state(tale, live=live) in ("finished", "stopped"):
        return None
    ended = any(failure.event == "run_finished" for failure in episodes.every(newest.failures))
    return newest.first if (newest.over_at is None or ended) and not newest.first.ends_nothing else None


def what_next(run: str, tale: Tale, *, live: bool) -> list[str]:
    """Return what to type next."""
    now = state(tale, live=live)
    cause = cause_of_end(tale, live=live)
    if cause is not None:
        return cause.code.what_next(place(cause, run))
    if now == "cut off":
        return [f"go on from the newest checkpoint: `elastic-harness resume {run}`", *CUT_OFF.what_next({"run": run})]
    if now == "going on":
        return [f"see who is there: `elastic-harness status {run}`"]
    if now == "stopped":
        return [f"go on: `elastic-harness resume {run}`"]
    return [f"prove that no sample was lost: `elastic-harness verify {run}`"]


def place(failure: Failure, run: str) -> dict[str, object]:
    """Return what is known of the place of a failure, for `Code.what_next`."""
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
            yield from failure_in_words(failure, "")
        yield from paragraph("cost", [_cost(episode)], "  ")
        yield ""
    yield from paragraph("the end", [_end(tale, live=live)])
    yield from paragraph("next", what_next(run, tale, live=live))


def failure_in_words(failure: Failure, indent: str = "") -> Iterator[str]:
    """Yield a failure, with all that followed from it, as lines."""
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
        yield from failure_in_words(each, inner)


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
            f"{episode.cost_s:.2f} s, by which step {episode.over_step} came later than without it; it was committed "
            f"{after_s:.2f} s after the failure was noticed"
        )
    elif episode.interrupted:
        said.append("not known: it is not known how long a step took before")
    elif any(f.code.family == "T" or f.code is SLOT_RETRIED for f in episodes.every(episode.failures)):
        said.append("not measured: training went on, but steps may have taken longer")
    else:
        said.append("no time: nobody waited for it")
    return "; ".join(said)


def _end(tale: Tale, *, live: bool) -> str:
    now = state(tale, live=live)
    newest = tale.commits[-1] if tale.commits else None
    so_far = f"step {newest.step} was committed at {_moment(newest.t)[11:]}" if newest else "no step was committed"
    if now == "going on":
        return f"the run goes on; {printable(tale.waiting) or so_far}"
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
