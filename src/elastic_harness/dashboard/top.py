"""`elastic-harness top`: a run at a glance, in a terminal: workers, speed, failures and what they cost. It only reads
the run's folder."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_harness.dashboard.follow import Followed
from elastic_harness.dashboard.shown import RunShown, rows, show
from elastic_harness.errors import EXIT_SUCCESS, ConfigError
from elastic_harness.report.terminal import sparkline, stages_text
from elastic_harness.report.words import printable
from elastic_harness.runs import named
from elastic_harness.runs.events import EVENTS
from elastic_harness.runs.folder import RECORD

INTERVAL_S = 1.0
FAILURES_SHOWN = 6
WORKERS_SHOWN = 40
WIDTH = 100  # where no terminal says how wide it is
GIB = 2**30
_STYLES = {"training": "green", "starting": "yellow", "waiting": "cyan"}
_LOSS = 3  # the column


def main(argv: Sequence[str]) -> int:
    """Show a run until Ctrl-C, or once."""
    parser = argparse.ArgumentParser(prog="elastic-harness top", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run folder, or an id below runs/")
    parser.add_argument("--once", action="store_true", help="print it once, for scripts")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, metavar="S", help="between looks (default: 1)")
    given = parser.parse_args(list(argv))
    if not given.interval > 0:
        raise ConfigError(f"--interval is {given.interval}; it must be a number of seconds above 0")
    followed = _followed(given.run)
    console = Console(highlight=False, width=None if os.isatty(1) else WIDTH)
    followed.read()
    if given.once or not console.is_terminal:
        console.print(draw(show(followed, time.time()), followed, console.width, 1000))
        return EXIT_SUCCESS
    try:
        with Live(console=console, screen=True, auto_refresh=False, transient=True) as screen:
            while True:
                followed.read()
                shown = show(followed, time.time())
                screen.update(draw(shown, followed, console.width, console.height), refresh=True)
                time.sleep(given.interval)
    except KeyboardInterrupt:
        return EXIT_SUCCESS


def _followed(run: str) -> Followed:
    paths: list[Path] = named.holding(run, RECORD, EVENTS) or named.of_run(run, RECORD, EVENTS)
    if not any((path / file).exists() for path in paths for file in (RECORD, EVENTS)):
        raise ConfigError(f"there is no run in {paths[0]}; `elastic-harness ls` lists the runs")
    return Followed(paths[0].resolve().name.partition("@")[0], paths)


def draw(shown: RunShown, followed: Followed, width: int, height: int) -> RenderableType:
    """Return the whole screen, cut to so many lines."""
    now = shown.now
    parts: list[RenderableType] = [_head(now), *_figures(now, width)]
    losses = [loss for row in rows(followed.run.series.points) if (loss := row[_LOSS]) is not None]
    if len(losses) > 2:
        parts.append(Text("loss  " + sparkline(losses, max(10, width - 8)), style="cyan"))
    for said, style in ((now["waiting"], "yellow"), ("" if now["live"] else now["message"], "bold")):
        if said:
            parts.append(Text(printable(f"waiting: {said}" if style == "yellow" else said), style=style))
    room = max(1, height - len(parts) - FAILURES_SHOWN - 4)
    parts += [_workers(shown, min(room, WORKERS_SHOWN)), *_failures(shown, now)]
    return Group(*parts)


def _head(now: dict[str, Any]) -> RenderableType:
    head = Table.grid(expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    good = now["live"] or now["state"] == "finished"
    name = Text.assemble((f"{now['run']}  ", "bold"), (now["state"], "green" if good else "red"))
    age = "" if now["committed_at"] is None else f"last step {_seconds(now['at'] - now['committed_at'])} ago"
    head.add_row(name, Text(f"{age}  {time.strftime('%H:%M:%S', time.localtime(now['at']))}", style="dim"))
    return head


def _figures(now: dict[str, Any], width: int) -> list[RenderableType]:
    speed, best, wanted = now["tokens_per_s"], now["best_tokens_per_s"], now["steps_wanted"]
    done = 0 if now["step"] is None else now["step"] + 1
    saved = max((each["t"] for each in now["checkpoints"]), default=None)
    effective = now["time"]["effective"]
    values = [
        ("steps", f"{done:,}{f' of {wanted:,}' if wanted else ''}"),
        ("loss", "–" if now["loss"] is None else f"{now['loss']:.4f}"),
        ("lr", "–" if now["lr"] is None else f"{now['lr']:.3g}"),
        ("a step", _seconds(now["step_s"])),
        ("tokens/s", "–" if speed is None else f"{speed:,.0f}"),
        ("of its best", "–" if not (speed and best) else f"{speed / best:.0%}"),
        ("effective", "–" if effective is None else f"{effective:.1%}"),
        ("failures", f"{now['lost']['failures']}, {_seconds(now['lost']['seconds'])} lost"),
        ("checkpoint", "none" if saved is None else f"{_seconds(now['at'] - saved)} ago"),
        ("data", "–" if now["computed"] is None else f"position {now['computed']['position']:,}"),
    ]
    columns = max(1, min(5, width // 24))
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in range(columns):
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    cells = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in values]
    for at in range(0, len(cells), columns):
        table.add_row(*cells[at : at + columns])
    return [table]


def _workers(shown: RunShown, room: int) -> RenderableType:
    living = [w for w in shown.crew["workers"] if w["end"] is None and shown.now["live"]]
    if not living:
        return Text("no worker is there", style="dim")
    slots = {part["member"]: part["end"] - part["first"] for part in (shown.now["computed"] or {"by": []})["by"]}
    memory = {each["member"]: each["bytes"] for each in shown.now["memory"]["workers"]}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "worker", "state", "slots", "memory", "pid", "here for"):
        table.add_column(name, no_wrap=True)
    for worker in sorted(living, key=lambda w: (w["rank"] is None, w["rank"] or 0, w["member"]))[:room]:
        held = memory.get(worker["member"])
        table.add_row(
            "–" if worker["rank"] is None else str(worker["rank"]),
            printable(worker["member"]),
            Text(worker["state"], style=_STYLES.get(worker["state"], "red")),
            str(slots.get(worker["member"], "–")),
            "–" if held is None else f"{held / GIB:.2f} GiB",
            str(worker["pid"]),
            _seconds(shown.now["at"] - worker["started"]),
        )
    if len(living) > room:
        table.add_row("", f"and {len(living) - room} more")
    return table


def _failures(shown: RunShown, now: dict[str, Any]) -> list[RenderableType]:
    episodes = shown.failures["episodes"][:FAILURES_SHOWN]
    if not episodes:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for name in ("at", "code", "cost", "stages, ms"):
        table.add_column(name, no_wrap=True)
    table.add_column("what", ratio=1, no_wrap=True, overflow="ellipsis")
    for episode in episodes:
        first = episode["failures"][0]
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(episode["t"]))
        cost = _seconds(episode["cost_s"]) if episode["interrupted"] else "–"
        what = Text(printable(first["what"]))
        table.add_row(at, Text(first["code"], style="red"), cost, stages_text(episode["stages"]), what)
    said = f"elastic-harness explain {now['folders'][0]}"
    return [table, Text(said, style="dim", no_wrap=True, overflow="ellipsis")]


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    value = max(0.0, value)
    for limit, unit, name in ((1, 0.001, "ms"), (100, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if value < limit:
            return f"{value / unit:.{0 if name == 'ms' else 1}f} {name}"
    return f"{value / 86400:.1f} days"
