"""Metrics in PromQL expressions, which stand there without the prefix. Pure."""

from __future__ import annotations

import re

from elastic_harness.metrics.table import PREFIX, TABLE

_ENDINGS = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_NAMES = {metric.name + ending: metric.name for metric in TABLE.values() for ending in _ENDINGS[metric.kind]}
_METRIC_OR_LABEL = re.compile(
    rf"(?P<by>\b(?:by|on|ignoring|group_left|group_right)\s*\([^)]*\))|(?P<string>\"[^\"]*\")|"
    rf"\b(?P<name>{'|'.join(sorted(_NAMES, key=len, reverse=True))})\b(?:\{{(?P<own>[^}}]*)\}})?"
)


def whole_names(expression: str, selector: str = "") -> str:
    """Return an expression with the whole names of its metrics, each narrowed down by a selector too."""

    def whole(match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0]
        selectors = ",".join(each for each in (match["own"], selector) if each)
        return PREFIX + match["name"] + (f"{{{selectors}}}" if selectors else "")

    return _METRIC_OR_LABEL.sub(whole, expression)


def metrics_in(expression: str) -> set[str]:
    """Return the metrics of the table that an expression names."""
    return {_NAMES[match["name"]] for match in _METRIC_OR_LABEL.finditer(expression) if match["name"]}
