"""What a cell shows of a running job: a panel that is drawn again and again, and buttons. Elsewhere, plain lines."""

from __future__ import annotations

import contextlib
import html
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic_harness.demo.screen import progress_text, stages_text
from elastic_harness.runs.story import Recovery, Story

OUTPUT_LINES = 12
RECOVERIES_SHOWN = 6
CURVE = (560, 90)  # width and height, in pixels
POINTS_MAX = 280  # of the curve
HINT = "interrupt the cell to stop · in a terminal: elastic-harness kill {run} rank0 · buttons: launch(…, wait=False)"
Actions = Mapping[str, Callable[[], object]]
"""What buttons do, by what stands on them. Each returns what it has done, in words."""
_GREEN, _RED, _BLUE, _FAINT = "#2b8a3e", "#e03131", "#1864ab", "#868e96"


@dataclass(frozen=True)
class Panel:
    """What there is to show."""

    title: str
    state: str  # in a few words
    run_dir: Path
    story: Story
    news: Sequence[str]  # the lines that workers and agent have printed since the last panel
    output: Sequence[str]  # the last of all lines
    failed: bool
    ended: bool


class JobView(Protocol):
    """Shows a job. It may be called from another thread than the cell's."""

    def show(self, panel: Panel) -> None: ...


def choose(actions: Actions) -> JobView:
    """Return the view that fits where this process runs. actions: of its buttons; none, if nobody could press
    them."""
    with contextlib.suppress(ImportError):
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()
        if getattr(shell, "kernel", None) is not None:
            return CellView(actions)
    return LineView()


class CellView:
    """A panel in the cell's output. Its last state stays in the notebook's file; the buttons go with the job. Without
    ipywidgets there are none, and the panel says how to do without."""

    def __init__(self, actions: Actions) -> None:
        from IPython.display import display

        buttons = _buttons(actions) if actions else None
        self._buttons: Any = None if buttons is None else display(buttons, display_id=True)
        self._panel: Any = display({"text/plain": "starting …"}, raw=True, display_id=True)
        self._drawn: dict[str, str] = {}

    def show(self, panel: Panel) -> None:
        hint = "" if self._buttons is not None or panel.ended else HINT.format(run=panel.run_dir)
        drawn = {"text/html": as_html(panel, hint), "text/plain": "\n".join(as_lines(panel))}
        if drawn != self._drawn:
            self._panel.update(drawn, raw=True)
            self._drawn = drawn
        if panel.ended and self._buttons is not None:
            self._buttons.update({"text/plain": ""}, raw=True)
            self._buttons = None


def _buttons(actions: Actions) -> Any:
    """Return a row of buttons, with a place for what they have to say; None without ipywidgets."""
    try:
        import ipywidgets
    except ImportError:
        return None
    said = ipywidgets.HTML()

    def press(action: Callable[[], object]) -> None:
        try:
            said.value = html.escape(str(action()))
        except Exception as error:  # whatever it is, the one who pressed has to see it
            said.value = f"<span style='color:{_RED}'>{html.escape(str(error))}</span>"

    row = []
    for label, action in actions.items():
        button = ipywidgets.Button(description=label, layout=ipywidgets.Layout(width="auto"))
        button.on_click(lambda _, action=action: press(action))
        row.append(button)
    return ipywidgets.HBox([*row, said])


class LineView:
    """Prints what the workers and the agent print, for a process that is no notebook's."""

    def show(self, panel: Panel) -> None:
        for line in panel.news:
            print(line, flush=True)
        if panel.ended:
            print(f"{panel.title}: {panel.state}", flush=True)


def events_in_words(story: Story) -> list[str]:
    """Return a line for each worker that was lost, and for each recovery, in the order of time."""
    lines = [(t, f"{member} was lost") for member, t in story.noticed.items()]
    lines += [(each.t, _in_words(each)) for each in story.recoveries.values()]
    return [line for _, line in sorted(lines)]


def _in_words(recovery: Recovery) -> str:
    at = "" if recovery.step is None else f", goes on with step {recovery.step + 1}"
    return f"recovered in {recovery.total_ms:.0f} ms ({stages_text(recovery.stages)}){at}"


def as_lines(panel: Panel) -> Iterator[str]:
    """Yield the panel as plain lines."""
    yield f"{panel.title}: {panel.state}"
    if panel.story.last is not None:
        yield progress_text(panel.story, panel.story.last)
    yield from events_in_words(panel.story)
    yield from panel.output


def as_html(panel: Panel, hint: str = "") -> str:
    """Return the panel. It loads nothing, and needs no script."""
    story, last = panel.story, panel.story.last
    colour = _RED if panel.failed else _GREEN if panel.ended else _BLUE
    parts = [f"<b>{html.escape(panel.title)}</b> <span style='color:{colour}'>{html.escape(panel.state)}</span>"]
    if last is not None:
        parts += [html.escape(progress_text(story, last).strip()), _bar(story, colour), _curve(story)]
    parts.append(_workers(story, ended=panel.ended))
    events = events_in_words(story)
    left_out = [f"… {len(events) - RECOVERIES_SHOWN} earlier lines"] if len(events) > RECOVERIES_SHOWN else []
    parts += [html.escape(line) for line in (*left_out, *events[-RECOVERIES_SHOWN:])]
    if panel.output:
        text = html.escape("\n".join(panel.output))
        parts.append(f"<pre style='color:{_FAINT};margin:4px 0 0;font-size:85%;white-space:pre-wrap'>{text}</pre>")
    parts += [f"<small style='color:{_FAINT}'>{html.escape(hint)}</small>"] if hint else []
    style = f"border-left:4px solid {colour};padding:4px 10px;line-height:1.5"
    return f"<div style='{style}'>" + "".join(f"<div>{part}</div>" for part in parts if part) + "</div>"


def _bar(story: Story, colour: str) -> str:
    if not story.max_steps:
        return ""
    share = 100 * min(1.0, (max(story.commits, default=-1) + 1) / story.max_steps)
    inner = f"<div style='background:{colour};height:6px;width:{share:.1f}%'></div>"
    return f"<div style='background:#dee2e6;width:{CURVE[0]}px;max-width:100%'>{inner}</div>"


def _curve(story: Story) -> str:
    """The loss of each step, with a red line where workers were lost."""
    steps = sorted(step for step, commit in story.commits.items() if commit.loss == commit.loss)
    if len(steps) < 3:
        return ""
    steps = steps[:: -(-len(steps) // POINTS_MAX)]
    losses = [story.commits[step].loss for step in steps]
    low, high, (width, height) = min(losses), max(losses), CURVE
    end = max(story.max_steps - 1, steps[-1], 1)

    def x(step: float) -> float:
        return width * step / end

    points = " ".join(
        f"{x(step):.1f},{height - 4 - (height - 8) * (loss - low) / ((high - low) or 1):.1f}"
        for step, loss in zip(steps, losses, strict=True)
    )
    lost = {
        max((step for step, commit in story.commits.items() if commit.t <= t), default=0)
        for t in story.noticed.values()
    }
    lines = "".join(
        f"<line x1='{x(s):.1f}' x2='{x(s):.1f}' y1='0' y2='{height}' stroke='{_RED}'/>" for s in sorted(lost)
    )
    return (
        f"<svg width='{width}' height='{height}' style='max-width:100%'>{lines}"
        f"<polyline points='{points}' fill='none' stroke='{_BLUE}' stroke-width='1.5'/></svg>"
    )


def _workers(story: Story, *, ended: bool) -> str:
    """The living workers by rank, those that start, and those that were lost a moment ago."""
    if ended:
        return ""
    cells = [f"<span style='color:{_GREEN}'>● rank {w.rank} {html.escape(w.member)}</span>" for w in story.up()]
    cells += [f"<span style='color:{_FAINT}'>○ {html.escape(w.member)}</span>" for w in story.spares()]
    now = time.time()
    for worker in story.workers.values():
        if worker.end in ("killed", "failed") and worker.ended is not None and now - worker.ended < 3:
            cells.append(f"<span style='color:{_RED}'>✗ {html.escape(worker.member)}</span>")
    return "&emsp;".join(cells)
