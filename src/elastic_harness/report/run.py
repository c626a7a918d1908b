"""The report of any run: one HTML file that needs nothing else. Needs matplotlib."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from elastic_harness.incidents.naming import was_asked_for
from elastic_harness.report import plots
from elastic_harness.report.figures import Account, KeptThroughput, account, held_up, kept
from elastic_harness.report.page import page, picture, table, text, tiles
from elastic_harness.report.words import state, tale_in_words
from elastic_harness.runs.episodes import Episode, Tale, every
from elastic_harness.runs.story import Story

BARS_MAX = 30  # the costliest recoveries that are drawn


@dataclass(frozen=True)
class Facts:
    """Everything that the report shows."""

    run: str
    folders: Sequence[Path]
    tale: Tale
    story: Story
    damaged: Sequence[str]
    live: bool
    target_s: float | None  # within which training is to go on after a failure


@dataclass(frozen=True)
class _Mark:
    """An episode on a picture."""

    t: float
    step: int
    label: str


def render(facts: Facts) -> str:
    """Return the whole page; it loads nothing from anywhere."""
    tale = facts.tale
    now = state(tale, live=facts.live)
    body = _BODY.format(
        tiles=tiles(_tiles(facts)),
        pictures="\n".join(_pictures(facts)) if tale.commits else "<p>No step was committed.</p>",
        times=table(("part", "seconds", "share", "what it is"), _times(account(tale))),
        failures=table(_HEADS, [_row(facts, episode) for episode in tale.episodes])
        if tale.episodes
        else "<p>Nothing went wrong.</p>",
        words=text("\n".join(tale_in_words(facts.run, facts.folders, tale, facts.damaged, live=facts.live))),
        run=text(facts.run),
    )
    about = f"{facts.run}, as its events tell it. Times are by the clocks of the machines that wrote them."
    return page(f"elastic-harness {facts.run}", _headline(facts, now), about, body, good=now != "failed")


def _pictures(facts: Facts) -> Iterator[str]:
    tale, story = facts.tale, facts.story
    marks = [_mark(tale, episode) for episode in tale.episodes]
    measured = [e for e in tale.episodes if e.cost_s is not None and story.stages_after(e.began_at)]
    costliest = sorted(measured, key=lambda e: e.cost_s or 0.0, reverse=True)[:BARS_MAX]
    bars = [_mark(tale, episode) for episode in sorted(costliest, key=lambda e: e.began_at)]
    healthy_ms = 1000 * (tale.healthy_s or 0.0)
    runs = ((story, plots.CALM, "at the start"),)
    drawn: list[tuple[str, float, Callable[[Figure], object]]] = [
        ("Loss", 3.6, lambda f: plots.draw_loss(f.subplots(), story, marks, "failure")),
        ("Worker processes over time", 3.6, lambda f: plots.draw_timeline(f.subplots(), story, marks, "lost")),
        ("Stages of the recoveries", 1.6 + 0.5 * len(bars),
         lambda f: plots.draw_recoveries(f.subplots(), story, bars, healthy_ms, "failure")),
        ("Speed", 2.8, lambda f: plots.draw_speed(f.subplots(), runs, marks, "failure")),
    ]  # fmt: skip
    with matplotlib.rc_context(plots.STYLE):
        for title, height, draw in drawn:
            if bars or not title.startswith("Stages"):
                yield picture((9.6, height), title, draw)


def _headline(facts: Facts, now: str) -> str:
    tale, share = facts.tale, account(facts.tale).effective
    alarms = sum(failure.ends_nothing for failure in tale.failures)
    requests = sum(was_asked_for(failure.code) for failure in tale.failures)
    said = [f"{len(tale.commits)} steps", _counted(len(tale.failures) - alarms - requests, "failure")]
    said += [_counted(alarms, "alarm")] if alarms else []
    said += [f"{_counted(requests, 'time')} asked to stop"] if requests else []
    said += [] if share is None else [f"{100 * share:.1f} % of the time trained"]
    return f"{now}: {', '.join(said)}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _tiles(facts: Facts) -> list[tuple[str, str]]:
    costs, parts = held_up(facts.tale), account(facts.tale)
    healthy_s = facts.tale.healthy_s
    shares = [each.share for episode in facts.tale.episodes if (each := kept(facts.tale, episode)) is not None]
    shown = [
        (str(len(facts.tale.commits)), "steps committed"),
        ("–" if parts.effective is None else f"{100 * parts.effective:.1f} %", "effective training time"),
        (_seconds(statistics.median(costs) if costs else None), f"held up by a failure, median of {len(costs)}"),
        (_seconds(max(costs, default=None)), "held up, worst"),
        (f"{100 * statistics.median(shares):.0f} %" if shares else "–", "throughput kept after a loss, median"),
        (_seconds(healthy_s), "a step, median"),
    ]
    if facts.target_s is not None:
        within = sum(cost <= facts.target_s for cost in costs)
        shown.insert(2, (f"{within} of {len(costs)}", f"recoveries within the target of {facts.target_s:g} s"))
    return shown


_WHAT: dict[str, str] = {
    "start_s": "until the first step began",
    "trained_s": "steps were computed that count",
    "held_up_s": "failures: so much later came the next new steps",
    "down_s": "between a launch that failed, or was cut off, and the next one",
    "after_s": "after the newest step",
}


def _times(parts: Account) -> Sequence[tuple[str, ...]]:
    meant_s = parts.wall_s - parts.paused_s
    rows = []
    for name, what in _WHAT.items():
        seconds: float = getattr(parts, name)
        share = f"{100 * seconds / meant_s:.1f} %" if meant_s > 0 else "–"
        rows.append((name.removesuffix("_s").replace("_", " "), f"{seconds:.2f}", share, what))
    rows.append(("paused", f"{parts.paused_s:.2f}", "–", "between a launch that was stopped or finished, and the next"))
    return rows


_HEADS = ("at", "code", "who", "in step", "group again after", "next step after", "held up", "target", "kept", "what")


def _row(facts: Facts, episode: Episode) -> tuple[str, ...]:
    tale, target_s = facts.tale, facts.target_s
    stages = facts.story.stages_after(episode.began_at) if episode.interrupted else {}
    group_s = sum(stages.values()) / 1000 if stages else None
    after_s = episode.over_at - episode.began_at if episode.over_at is not None and episode.interrupted else None
    met = "–" if target_s is None or episode.cost_s is None else "met" if episode.cost_s <= target_s else "missed"
    failures = list(every(episode.failures))
    who = ", ".join(dict.fromkeys(f.member or f.node or "all" for f in failures))
    redone = f"; {episode.redone_steps} steps computed again" if episode.redone_steps else ""
    return (
        f"{episode.began_at - (tale.started_at or episode.began_at):.1f} s",
        ", ".join(dict.fromkeys(f.code.id for f in failures)),
        who,
        str(_mark(tale, episode).step),
        _seconds(group_s),
        _seconds(after_s),
        _seconds(episode.cost_s),
        met,
        _kept(kept(tale, episode)),
        "; ".join(f.what for f in episode.failures) + redone,
    )


def _kept(found: KeptThroughput | None) -> str:
    if found is None:
        return "–"
    return f"{100 * found.share:.0f} % with {found.workers_after} of {found.workers_before} workers"


def _mark(tale: Tale, episode: Episode) -> _Mark:
    done = bisect.bisect_right(tale.commits, episode.began_at, key=lambda commit: commit.t)
    running = tale.commits[done - 1].step + 1 if done else 0
    step = episode.first.step if episode.first.step is not None else running
    return _Mark(episode.began_at, step, episode.first.code.id.removeprefix("EH-"))


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


_BODY = """{tiles}
<h2>What happened</h2>
{pictures}
<h2>Every failure</h2>
<p><i>Held up</i>: by so much the next new step came later than without the failure; to notice it and to compute steps
again are in it. <i>Kept</i>: of the throughput, until all workers were there again.</p>
{failures}
<h2>Where the time went</h2>
{times}
<h2>In words</h2>
<pre>{words}</pre>
<h2>Look for yourself</h2>
<p><code>elastic-harness explain {run}</code><br><code>elastic-harness verify {run}</code></p>"""
