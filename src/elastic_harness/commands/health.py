"""`elastic-harness health`: asks what the rules for failures that are no deaths would have said about a run."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args, get_type_hints

from elastic_harness.errors import EXIT_SUCCESS, ConfigError
from elastic_harness.health.spikes import SpikePolicy
from elastic_harness.policies import Apply, GoBack, State, StepFacts
from elastic_harness.runs import named
from elastic_harness.runs.events import EVENTS, read_events
from elastic_harness.runs.ledger import LEDGER, read_ledger

SHOWN_MAX = 20


def main(argv: Sequence[str]) -> int:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(prog="elastic-harness health", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    backtest = commands.add_parser(
        "backtest",
        help="which steps of a run would have stood out as spikes",
        description="Give the recorded losses and gradient norms of a run to the rule for spikes, with several "
        "thresholds. Nothing is computed again: it shows when a rule would have fired, not what training would have "
        "become. Then set health.on_spike, health.spike_sigmas and health.spike_window for the next run.",
        allow_abbrev=False,
    )
    backtest.add_argument("run", metavar="RUN", help="a run folder, or an id below runs/")
    backtest.add_argument(
        "--sigmas", type=float, nargs="+", default=[4.0, 6.0, 8.0], help="thresholds of the loss (default: 4 6 8)"
    )
    backtest.add_argument(
        "--norm-factor", type=float, default=2.0, help="times these: the thresholds of the norm (default: 2)"
    )
    backtest.add_argument("--window", type=int, default=128, help="steps that say what is usual (default: 128)")
    backtest.add_argument(
        "--on-spike",
        choices=get_args(get_type_hints(SpikePolicy)["answer"]),
        default="warn",
        help="what would have been done about these steps (default: warn)",
    )
    backtest.add_argument("--json", action="store_true", help="as one JSON object")
    given = parser.parse_args(list(argv))
    for name, least, values in (
        ("--sigmas", 0.1, given.sigmas), ("--norm-factor", 0.1, [given.norm_factor]), ("--window", 4, [given.window])
    ):  # fmt: skip
        if min(values) < least:
            raise ConfigError(f"{name} is {min(values):g}; it must be at least {least:g}")
    rules = [SpikePolicy(given.on_spike, each, each * given.norm_factor, given.window) for each in sorted(given.sigmas)]
    return _backtest(given.run, rules, given.window, as_json=given.json)


def _backtest(run: str, rules: Sequence[SpikePolicy], window: int, *, as_json: bool) -> int:
    steps = committed(named.of_run(run, LEDGER))
    if not steps:
        raise ConfigError(f"{run} has no committed step yet; name a run that has trained")
    judged = max(0, len(steps) - rules[0].least)
    found = [(rule, stand_out(steps, rule)) for rule in rules]
    if as_json:
        told = [{**asdict(rule), "steps": each} for rule, each in found]
        print(json.dumps({"run": run, "steps": len(steps), "judged": judged, "rules": told}))
        return EXIT_SUCCESS
    print(f"{len(steps):,} steps of {run}, of which {judged:,} have enough steps before them (window {window})")
    for rule, each in found:
        rate = f" ({1e5 * len(each) / judged:.3g} in 100,000)" if judged else ""
        print(f"  loss above {rule.sigmas:g} σ or norm above {rule.norm_sigmas:g} σ: {len(each)} steps{rate}")
    _, widest = found[0]
    for step, reason in list(widest.items())[:SHOWN_MAX]:
        print(f"    step {step}: {reason}")
    if len(widest) > SHOWN_MAX:
        print(f"    and {len(widest) - SHOWN_MAX} more; --json lists all")
    return EXIT_SUCCESS


def committed(folders: Sequence[Path]) -> list[StepFacts]:
    """Return what a run has recorded of each step along its last lineage, in order. Without clipping no norm is
    recorded."""
    norms: dict[tuple[int, int], float | None] = {}
    for folder in folders:
        for event in read_events(folder / EVENTS) if (folder / EVENTS).exists() else ():
            if event["event"] == "step_committed":
                norms[event.get("lineage", 0), event["step"]] = event.get("grad_norm")
    facts = []
    for step, line in read_ledger(*folders).followed().items():
        norm = norms.get((line.lineage, step))
        facts.append(StepFacts(step, line.loss, float("nan") if norm is None else norm, 0.0, (), ()))
    return facts


def stand_out(steps: Iterable[StepFacts], policy: SpikePolicy) -> dict[int, str]:
    """Return the steps that the rule for spikes names, and what it says about each. Of steps that it would have omitted
    it is not asked, and its window is that of before."""
    state, found, next_asked = policy.begin(), dict[int, str](), 0
    recent = deque[State](maxlen=policy.rollback_steps + 1)  # before this step, and before those that are given up
    for facts in steps:
        if facts.step < next_asked:
            continue
        recent.append(state)
        state, verdict = policy.before_apply(state, facts)
        if not verdict.evidence:  # it stands out only where there is some
            continue
        found[facts.step] = verdict.reason
        if isinstance(verdict, GoBack):
            first, last = verdict.steps.start, verdict.steps.stop - 1
            found[facts.step] += f"; it would go back to version {verdict.to}, and omit the steps {first}-{last}"
            state, next_asked = recent[0], verdict.steps.stop
            recent.clear()
        elif isinstance(verdict, Apply) and verdict.lr_scale != 1.0:
            found[facts.step] += f"; learning rate times {verdict.lr_scale:g}, back after {policy.lr_steps} steps"
    return found
