"""The demo's view of a running job: a live screen on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_harness.report.terminal import sparkline, stages_text
from elastic_harness.runs.story import CommittedStep, Kill, Story, WorkerStory

SHOW_DEAD_S = 2.5
DRAW_INTERVAL_S = 0.15
SHOWN_STRIKES = 8
LINES_PER_RUN = 20


class Screen:
    """Shows a Story while it grows. Use as a context, and call `update` as often as you like."""

    def __init__(self, console: Console, title: str, plain: bool, keys: str = "") -> None:
        self.console = console
        self.title = title
        self.plain = plain or not console.is_terminal
        self.keys = keys
        self._live: Live | None = None
        self._next_draw = 0.0
        self._printed_step = -1
        self._printed_recoveries: set[int] = set()
        self._known_workers: set[str] = set()
        self._waiting: str | None = None

    def __enter__(self) -> Screen:
        if self.plain:
            self.line(f"--- {self.title}")
        else:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    def line(self, text: str) -> None:
        """Print one line, above the live part if there is one."""
        self.console.print(escape(text), highlight=False, soft_wrap=True)

    def update(self, story: Story, kills: Sequence[Kill], last: bool = False) -> None:
        """Show the story as it stands now; the live part is redrawn a few times a second, and at the last."""
        if self._live is not None:
            now = time.monotonic()
            if last or now >= self._next_draw:
                self._next_draw = now + DRAW_INTERVAL_S
                self._live.update(render(story, kills, self.title, self.keys, self.console.width), refresh=True)
        else:
            self._print_news(story)

    def struck(self, story: Story, kill: Kill) -> None:
        """Tell of a kill at the moment it is done."""
        if self._live is None:
            pids = " and ".join(str(pid) for pid in kill.pids)
            self.line(f"{_clock(story, kill.t)}  KILL  {kill.label} (pid {pids}) in step {kill.step}")

    def _print_news(self, story: Story) -> None:
        for member, worker in story.workers.items():
            if member not in self._known_workers and worker.placed is not None:
                self._known_workers.add(member)
                self.line(f"{_clock(story, worker.placed)}  up    rank {worker.rank} (pid {worker.pid})")
        for number, recovery in story.recoveries.items():
            if number not in self._printed_recoveries:
                self._printed_recoveries.add(number)
                self.line(
                    f"{_clock(story, recovery.t)}  OK    recovered in {recovery.total_ms:.0f} ms: "
                    f"{stages_text(recovery.stages)}"
                )
        if story.waiting != self._waiting:
            self._waiting = story.waiting
            if story.waiting:
                self.line(f"waiting: {story.waiting}")
        commit = story.last
        every = max(1, story.max_steps // LINES_PER_RUN)
        if commit is not None and commit.step >= self._printed_step + every:
            self._printed_step = commit.step
            self.line(f"{_clock(story, commit.t)}  {progress_text(story, commit)}")


def progress_text(story: Story, commit: CommittedStep) -> str:
    """The running figures in one line."""
    total = f"/{story.max_steps}" if story.max_steps else ""
    return (
        f"{commit.step + 1:>4}{total} steps  loss {commit.loss:.4f}  {story.tokens_per_s():,.0f} tokens/s  "
        f"{commit.world_size} workers"
    )


def render(story: Story, kills: Sequence[Kill], title: str, keys: str, width: int) -> RenderableType:
    """The whole live screen."""
    commit = story.last
    done = commit.step + 1 if commit else 0
    head = Table.grid(expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    text = progress_text(story, commit) if commit else (story.waiting or "starting the workers …")
    head.add_row(Text(text, style="bold"), Text(_clock(story, time.time()), style="dim"))
    bar = Table.grid(expand=True)  # a ProgressBar alone does not end its line
    bar.add_row(ProgressBar(total=max(story.max_steps, 1), completed=done))
    parts: list[RenderableType] = [head, bar]
    losses = [story.commits[step].loss for step in sorted(story.commits)]
    if len(losses) > 2:
        parts.append(Text("loss  " + sparkline(losses, max(10, width - 16)), style="cyan"))
    parts += [_workers(story), *_strikes(story, kills)]
    if story.waiting:
        parts.append(Text(f"waiting: {story.waiting}", style="yellow"))
    if keys:
        parts.append(Text(keys, style="dim"))
    return Panel(Group(*parts), title=escape(title), title_align="left", border_style="blue")


def _workers(story: Story) -> Columns:
    """Every place, as many in a row as the window takes."""
    now = time.time()
    dead = [
        worker
        for worker in story.workers.values()
        if worker.end in ("killed", "failed") and worker.ended is not None and now - worker.ended < SHOW_DEAD_S
    ]
    cells = [Text(f"● rank {rank} pid {worker.pid}", style="green") for rank, worker in _ranked(story)]
    cells += [Text(f"✗ pid {worker.pid} killed", style="bold red") for worker in dead]
    for worker in story.spares():
        cells.append(Text(f"○ {'spare' if worker.spare else 'starting'} pid {worker.pid}", style="cyan"))
    return Columns(cells, padding=(0, 3))


def _ranked(story: Story) -> list[tuple[int, WorkerStory]]:
    return [(rank, story.workers[m]) for rank, m in enumerate(story.members) if story.alive(m)]


def _strikes(story: Story, kills: Sequence[Kill]) -> list[RenderableType]:
    if not kills:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for column in ("at", "SIGKILL", "in step", "group again", "next commit", "stages, ms"):
        table.add_column(column, no_wrap=column != "stages, ms", justify="right" if column == "in step" else "left")
    for kill in kills[-SHOWN_STRIKES:]:
        stages, after = story.stages_after(kill.t), story.after_ms(kill.t)
        table.add_row(
            _clock(story, kill.t),
            Text(kill.label, style="red"),
            str(kill.step),
            f"{sum(stages.values()):.0f} ms" if stages else "…",
            f"{after:.0f} ms" if after is not None else "…",
            Text(stages_text(stages), style="dim"),
        )
    return [table]


def _clock(story: Story, t: float) -> str:
    elapsed = max(0.0, t - (story.started if story.started is not None else t))
    return f"{int(elapsed) // 60}:{elapsed % 60:04.1f}"
