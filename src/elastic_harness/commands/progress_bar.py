"""How far a long command is: one bar on standard error, which is gone when the command has ended."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar(Progress):
    """A bar with these columns, or those that rich shows by default. `fields`: what else its columns show."""

    def __init__(self, what: str, total: int | None, *columns: ProgressColumn, **fields: Any) -> None:
        super().__init__(*columns, transient=True, console=Console(stderr=True))
        self.task = self.add_task(what, total=total, **fields)

    @staticmethod
    def of_bytes(what: str, total: int | None) -> ProgressBar:
        """Make a bar that shows bytes and their speed."""
        text, left = TextColumn("{task.description}"), TimeRemainingColumn()
        return ProgressBar(what, total, text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), left)

    def done(self, more: int) -> None:
        """Move the bar on."""
        self.advance(self.task, more)
