"""The pictures of a report: each function draws one of a Story into the axes it is given. Needs matplotlib.

No text of a log gets into a picture: matplotlib would take dollar signs for formulas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elastic_harness.runs.story import Story, WorkerStory

STORM, CALM, KILL = "#d9480f", "#1864ab", "#e03131"
TRAINING, BOOTING, INK, FAINT = "#69b37f", "#d3ecd9", "#212529", "#868e96"
STAGE_COLOURS = ("#4263eb", "#15aabf", "#82c91e", "#fab005", "#fd7e14", "#e64980", "#7950f2", "#868e96")
POINTS_MAX = 4000  # of a curve
DOTS_MAX = 200
LABELS_MAX = 40  # on a picture
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "elastic-harness",
}


class Mark(Protocol):
    """Something to be marked on a picture: a kill of the demo, or a failure."""

    @property
    def t(self) -> float: ...
    @property
    def step(self) -> int: ...
    @property
    def label(self) -> str: ...


def drawn(steps: Iterable[int]) -> list[int]:
    """Return the steps that are drawn, in order: of many, evenly spread ones, and the last."""
    every = sorted(steps)
    apart = -(-len(every) // POINTS_MAX)
    return [*every[: -1 : apart], every[-1]] if apart > 1 else every


def draw_marks(axes: Axes, marks: Iterable[Mark], what: str) -> None:
    """A line for each mark, and one entry for all of them in the legend. Beside a failure stands its label."""
    for mark in marks:
        axes.axvline(mark.step, color=KILL, lw=0.8, alpha=0.6, zorder=0)
    axes.plot([], [], color=KILL, lw=0.8, label=what)


def draw_loss(axes: Axes, story: Story, marks: Sequence[Mark], what: str) -> None:
    """The loss of one run, and what it had to bear."""
    steps = drawn(story.commits)
    dots = "." if len(steps) < DOTS_MAX else ""  # so that a step between two that are not finite is seen
    axes.plot(steps, [story.commits[step].loss for step in steps], color=CALM, lw=1.2, marker=dots, label="training")
    _draw_validation(axes, story)
    draw_marks(axes, marks, what)
    for mark, height in zip(marks[:LABELS_MAX], itertools.cycle((0.98, 0.9, 0.82, 0.74)), strict=False):
        axes.text(mark.step, height, f" {mark.label}", transform=axes.get_xaxis_transform(), fontsize=6.5, color=KILL,
                  va="top")  # fmt: skip
    axes.set_title("Training loss")
    axes.set_ylabel("loss")
    axes.set_xlabel("step")
    axes.legend(loc="lower left")
    axes.grid(axis="y", alpha=0.2)


def draw_losses(axes: Axes, below: Axes, storm: Story, calm: Story, kills: Sequence[Mark]) -> None:
    """Both loss curves over each other, and their difference below."""
    steps, both = drawn(storm.commits), drawn(set(storm.commits) & set(calm.commits))
    axes.plot(steps, [storm.commits[step].loss for step in steps], color=STORM, lw=5, alpha=0.45,
              solid_capstyle="round", label="with kills")  # fmt: skip
    steps = drawn(calm.commits)
    axes.plot(steps, [calm.commits[step].loss for step in steps], color=CALM, lw=1.2, label="undisturbed")
    _draw_validation(axes, storm)
    draw_marks(axes, kills, "kill")
    draw_marks(below, kills, "kill")
    axes.set_title("Training loss")
    axes.set_ylabel("loss, nats per byte")
    axes.legend(loc="upper right")
    axes.tick_params(labelbottom=False)
    axes.grid(axis="y", alpha=0.2)
    differences = [storm.commits[step].loss - calm.commits[step].loss for step in both]
    largest = max((abs(value) for value in differences), default=0.0)
    below.plot(both, differences, color=INK, lw=1.4)
    below.set_ylim(*((-1.0, 1.0) if largest == 0 else (-1.3 * largest, 1.3 * largest)))
    below.set_ylabel("difference")
    below.set_xlabel("step")
    if largest == 0:
        below.set_yticks([0.0])
        below.text(0.99, 0.9, "exactly 0 at every step", transform=below.transAxes, ha="right", va="top", color=FAINT)


def _draw_validation(axes: Axes, story: Story) -> None:
    if story.validation:
        steps = sorted(story.validation)
        axes.plot(steps, [story.validation[step] for step in steps], "o", ms=4, color=INK, label="held-out data")


def draw_timeline(axes: Axes, story: Story, kills: Sequence[Mark], what: str) -> None:
    """Every worker process as a bar from start to end; a replacement takes over the row of the dead."""
    start = story.started or 0.0
    end = max(
        [worker.ended or 0.0 for worker in story.workers.values()] + [c.t for c in story.commits.values()] + [start]
    )
    rows = _rows(story.workers.values(), end)
    for index, row in enumerate(rows):
        for worker in row:
            ended = worker.ended if worker.ended is not None else end
            placed = min(worker.placed, ended) if worker.placed is not None else ended
            axes.barh(index, placed - worker.started, left=worker.started - start, color=BOOTING, height=0.62)
            axes.barh(index, ended - placed, left=placed - start, color=TRAINING, height=0.62)
            if worker.end in ("killed", "failed"):
                axes.plot(ended - start, index, "X", color=KILL, ms=8, mec="white", mew=0.8, zorder=3, clip_on=False)
            if ended - placed > 0.09 * (end - start):
                axes.text((placed + ended) / 2 - start, index, f"pid {worker.pid}", ha="center", va="center",
                          fontsize=7, color=INK)  # fmt: skip
    for kill in kills:
        axes.axvline(kill.t - start, color=KILL, lw=0.8, alpha=0.35, zorder=0)
    axes.barh([0], [0], color=TRAINING, label="training")
    axes.barh([0], [0], color=BOOTING, label="starting, or waiting as a spare")
    axes.plot([], [], "X", color=KILL, ms=8, mec="white", label=what)
    axes.set_ylim(len(rows) - 0.4, -1.3)
    axes.set_xlim(0, (end - start) * 1.01 or 1.0)
    axes.set_yticks(range(len(rows)), [f"place {index}" for index in range(len(rows))])
    axes.set_xlabel("seconds since the launch")
    axes.set_title("Worker processes")
    axes.legend(loc="upper right", ncols=3, fontsize=7.5, borderaxespad=0.1)


def draw_recoveries(axes: Axes, story: Story, kills: Sequence[Mark], healthy_ms: float, what: str) -> None:
    """One bar for each failure: the stages of its recovery, and the moment at which the next new step was committed.
    what: the failures are, in a word."""
    names: list[str] = []
    labels = []
    for index, kill in enumerate(kills):
        stages, after = story.stages_after(kill.t), story.after_ms(kill.t)
        labels.append(f"{kill.label}\nstep {kill.step}")
        left = 0.0
        for name, value in stages.items():
            if name not in names:
                names.append(name)
            axes.barh(index, value, left=left, color=_stage_colour(names.index(name)), height=0.55)
            left += value
        if after is not None:
            axes.plot([left, after], [index, index], color=FAINT, lw=1, zorder=0)
            axes.plot(after, index, "|", color=INK, ms=14, mew=2)
            axes.annotate(f"{after:.0f} ms", (after, index), xytext=(4, 0), textcoords="offset points",
                          va="center", fontsize=7.5, color=INK,
                          bbox={"fc": "white", "ec": "none", "pad": 0.6})  # fmt: skip
    for index, name in enumerate(names):
        axes.barh([0], [0], color=_stage_colour(index), label=name.removesuffix("_ms").replace("_", " "))
    axes.plot([], [], color=FAINT, lw=1, label="the rest of the step")
    axes.plot([], [], "|", color=INK, ms=10, mew=2, label="next step committed")
    axes.axvline(healthy_ms, color=CALM, lw=1, ls="--", label="a healthy step")
    axes.set_yticks(range(len(kills)), labels, fontsize=7.5)
    axes.set_ylim(len(kills) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * axes.get_xlim()[1])
    axes.set_xlabel(f"milliseconds since the {what}")
    axes.set_title("What each recovery took")
    axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=5, columnspacing=1.2)


def draw_speed(axes: Axes, runs: Sequence[tuple[Story, str, str]], marks: Sequence[Mark], what: str) -> None:
    """Tokens per second, step by step, by the clock, for each run with its colour and its name."""
    for story, colour, label in runs:
        steps = [step for step in drawn(story.commits) if step - 1 in story.commits]
        durations = [story.commits[step].t - story.commits[step - 1].t for step in steps]
        speeds = [story.commits[s].tokens / d if d > 0 else float("nan") for s, d in zip(steps, durations, strict=True)]
        world = next(iter(story.worlds), (0.0, 0))[1]
        axes.plot(steps, speeds, color=colour, lw=1.4, drawstyle="steps-mid", label=f"{label} ({world} workers)")
    draw_marks(axes, marks, what)
    axes.set_ylim(bottom=0)
    axes.set_title("Speed")
    axes.set_xlabel("step")
    axes.set_ylabel("tokens/s")
    axes.legend(loc="lower right")
    axes.grid(axis="y", alpha=0.2)


def overview(storm: Story, calm: Story, kills: Sequence[Mark], healthy_ms: float, title: str, good: bool) -> Figure:
    """All four pictures on one page."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold", color="#2b8a3e" if good else KILL, x=0.01, ha="left")
    halves = figure.add_gridspec(1, 2, width_ratios=(1, 1.1))
    left, right = halves[0].subgridspec(2, 1, height_ratios=(1.5, 1)), halves[1].subgridspec(2, 1)
    losses = left[0].subgridspec(2, 1, height_ratios=(3.4, 1))
    draw_losses(figure.add_subplot(losses[0]), figure.add_subplot(losses[1]), storm, calm, kills)
    draw_speed(figure.add_subplot(left[1]), ((storm, STORM, "with kills"), (calm, CALM, "undisturbed")), kills, "kill")
    draw_timeline(figure.add_subplot(right[0]), storm, kills, "SIGKILL")
    draw_recoveries(figure.add_subplot(right[1]), storm, kills, healthy_ms, "kill")
    return figure


def _rows(workers: Iterable[WorkerStory], end: float) -> list[list[WorkerStory]]:
    """Workers on as few rows as possible; each takes the row that became free last before it started."""
    rows: list[list[WorkerStory]] = []
    for worker in sorted(workers, key=lambda each: each.started):
        free = [row for row in rows if (row[-1].ended or end) <= worker.started]
        if free:
            max(free, key=lambda row: row[-1].ended or end).append(worker)
        else:
            rows.append([worker])
    return rows


def _stage_colour(index: int) -> str:
    return STAGE_COLOURS[index % len(STAGE_COLOURS)]
