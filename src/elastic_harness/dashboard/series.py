"""The steps of a run as a curve of bounded length. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POINTS_MAX = 2048


@dataclass
class Point:
    """Some steps in a row, or one."""

    first: int
    last: int
    t: float  # when the last one was committed
    begin: int  # where the first one's line begins in the log
    losses: int = 0  # that are numbers
    loss_sum: float = 0.0
    loss_low: float | None = None
    loss_high: float | None = None
    lr: float | None = None  # of the last one, as the rest
    grad_norm: float | None = None
    workers: int = 0
    tokens: float = 0.0  # of the steps that were timed
    timed_s: float = 0.0

    @property
    def loss(self) -> float | None:
        """The mean."""
        return self.loss_sum / self.losses if self.losses else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.timed_s if self.timed_s else None

    def merge(self, later: Point) -> None:
        """Add a later point."""
        self.last, self.t, self.workers = later.last, later.t, later.workers
        self.losses += later.losses
        self.loss_sum += later.loss_sum
        self.loss_low = _of_both(min, self.loss_low, later.loss_low)
        self.loss_high = _of_both(max, self.loss_high, later.loss_high)
        self.lr = later.lr if later.lr is not None else self.lr
        self.grad_norm = _of_both(max, self.grad_norm, later.grad_norm)
        self.tokens += later.tokens
        self.timed_s += later.timed_s


def _of_both(choose: Any, one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return choose(known) if known else None


def point_of(event: Mapping[str, Any], begin: int) -> Point:
    """Return the point of one committed step. Raises TypeError, ValueError or LookupError for another event."""
    step, step_s, tokens = int(event["step"]), number(event.get("step_s")), number(event.get("tokens"))
    loss, timed = number(event.get("loss")), step_s is not None and step_s > 0 and tokens is not None
    return Point(
        step,
        step,
        float(event["t"]),
        begin,
        losses=int(loss is not None),
        loss_sum=loss or 0.0,
        loss_low=loss,
        loss_high=loss,
        lr=number(event.get("lr")),
        grad_norm=number(event.get("grad_norm")),
        workers=int(event.get("world_size") or 0),
        tokens=(tokens or 0.0) if timed else 0.0,
        timed_s=(step_s or 0.0) if timed else 0.0,
    )


def number(value: object) -> float | None:
    """Return a finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None  # which NaN is not either


class Series:
    """All steps in a bounded number of points. A step that is committed again replaces all that came after it, and the
    point that it was in."""

    def __init__(self, points_max: int = POINTS_MAX) -> None:
        self.points: list[Point] = []
        self._points_max = points_max
        self.apart = 1  # steps in a point
        self.remade = 0  # how often points before the last one were changed

    def add(self, point: Point) -> None:
        """Add the point of one step."""
        if self.points and point.first <= self.points[-1].last:
            while self.points and self.points[-1].last >= point.first:
                self.points.pop()
            self.remade += 1
        if self.points and self.points[-1].first // self.apart == point.first // self.apart:
            self.points[-1].merge(point)
            return
        self.points.append(point)
        if len(self.points) > self._points_max:
            self._halve()

    def _halve(self) -> None:
        self.apart *= 2
        self.remade += 1
        merged: list[Point] = []
        for point in self.points:
            if merged and merged[-1].first // self.apart == point.first // self.apart:
                merged[-1].merge(point)
            else:
                merged.append(point)
        self.points = merged
