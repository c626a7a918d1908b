"""`elastic-harness report`: what happened in a run, as one HTML file that needs nothing else: the loss with all
failures on it, the effective training time, recoveries against a target, the throughput after a loss, what each failure
cost."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from elastic_harness import durable_file
from elastic_harness.commands.explain import check_told, read_logs
from elastic_harness.errors import EXIT_SUCCESS, ConfigError
from elastic_harness.report import figures
from elastic_harness.report.words import of_tale
from elastic_harness.runs import episodes
from elastic_harness.runs import folder as folders
from elastic_harness.runs.story import Story

HTML = "run-report.html"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}


def main(argv: Sequence[str]) -> int:
    """Write the report of a run."""
    parser = argparse.ArgumentParser(prog="elastic-harness report", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run folder, or an id below runs/")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"default: {HTML} in the run's folder")
    parser.add_argument("--target-recovery", metavar="TIME", help="within which training is to go on: 5s, 800ms, 2m")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object; a page only with -o")
    given = parser.parse_args(list(argv))
    target_s = None if given.target_recovery is None else _duration_s(given.target_recovery)
    damaged: list[str] = []
    paths, timed = read_logs(given.run, damaged)
    events = list(timed)
    tale = episodes.tell(events, damaged.append)
    check_told(given.run, tale, damaged)
    live = any(folders.locked(path) for path in paths)
    if given.output is not None or not given.json:
        output = given.output or paths[0] / HTML
        story = _story(events)
        _write(output, given.run, paths, tale, story, damaged, target_s, live=live)
        if not given.json:
            print(f"{output}: open it in a browser")
    if given.json:
        told = of_tale(given.run, paths, tale, damaged, live=live)
        print(json.dumps({**told, "figures": figures.as_object(tale, target_s)}))
    return EXIT_SUCCESS


def _write(
    output: Path,
    run: str,
    paths: Sequence[Path],
    tale: episodes.Tale,
    story: Story,
    damaged: Sequence[str],
    target_s: float | None,
    *,
    live: bool,
) -> None:
    try:
        from elastic_harness.report.run import Facts, render
    except ImportError as error:
        raise ConfigError(
            f"the report needs matplotlib ({error}): pip install 'elastic-harness[report]'; the figures alone need "
            "nothing: --json"
        ) from error
    facts = Facts(run, paths, tale, story, damaged, live, target_s)
    durable_file.write(output, render(facts).encode(), "ask for the report again, or write it elsewhere with -o FILE")


def _story(events: Sequence[episodes.TimedEvent]) -> Story:
    """Return what the pictures show. Events that cannot be used were told of before."""
    story = Story()
    for _, _, event in events:
        try:
            story.apply(event)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
    return story


def _duration_s(text: str) -> float:
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _UNIT_S[match[2]] if match else math.nan
    if not seconds > 0:
        raise ConfigError(f"--target-recovery is {text!r}; it must be a time above 0 such as 5s, 800ms or 2m")
    return seconds
