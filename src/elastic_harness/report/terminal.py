"""Figures of a run as text on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SPARKS = "▁▂▃▄▅▆▇█"


def stages_text(stages: Mapping[str, float]) -> str:
    """Stages in order, as 'detect 4 · release 1 · …' in milliseconds; what took less than a half is left out."""
    return " · ".join(f"{name.removesuffix('_ms')} {value:.0f}" for name, value in stages.items() if value >= 0.5)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one line of block characters; of more values than fit, evenly spread ones are shown."""
    if not values:
        return ""
    if len(values) > width:
        values = [values[index * (len(values) - 1) // (width - 1)] for index in range(width)]
    low, high = min(values), max(values)
    range_ = high - low or 1.0
    return "".join(SPARKS[int((value - low) / range_ * (len(SPARKS) - 1))] for value in values)
