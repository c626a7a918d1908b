"""`elastic-harness plan`: what failures will cost a run, how often to save it, and what recovery in place, spares and
spot machines are worth.

    elastic-harness plan --nodes 64 --node-mtbf-days 60 --hours 720
    elastic-harness plan --nodes 16 --price 32 --spot-price 11 --spot-mtbf-hours 20 --spares 1
    elastic-harness plan --run runs/mine --nodes 100            with what that run has measured
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elastic_harness import planning
from elastic_harness.errors import EXIT_CONFIG, EXIT_SUCCESS, EXIT_USER_CODE, ConfigError
from elastic_harness.planning import FailureCosts, Nodes, Strategy
from elastic_harness.runs import named
from elastic_harness.runs.events import EVENTS, read_events

HOUR_S, DAY_S = 3600.0, 86_400.0
TIERS = {"memory": "snapshot_s", "local disk": "checkpoint_s", "object storage": "upload_s"}
DEFAULTS: dict[str, Any] = {  # of what a run may have measured, or another option need
    "nodes": 16, "node_mtbf_days": 30.0, "snapshot_s": 0.5, "checkpoint_s": 30.0, "upload_s": 120.0, "recovery_s": 2.0,
    "spot_mtbf_hours": 24.0,
}  # fmt: skip
TOGETHER_S = 10.0
OWN_FAULTS = (EXIT_USER_CODE, EXIT_CONFIG)  # no machine's
PLOTTED_NODES = [2**power for power in range(13)]


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    given = _parser().parse_args(list(argv))
    measured = _measured(given.run) if given.run else {}
    _check(given)
    for name, value in (DEFAULTS | measured).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    nodes = Nodes(given.nodes, given.node_mtbf_days * DAY_S, given.replace_minutes * 60.0, given.spares)
    costs = FailureCosts(given.checkpoint_s, given.restart_s, given.recovery_s, given.outage_mtbf_days * DAY_S)
    made = _plan(given, nodes, costs)
    if given.plot:
        _plot(Path(given.plot), nodes, costs)
    print(
        json.dumps(_finite({**made, "measured": measured}), indent=1) if given.json else _shown(made, given, measured)
    )
    return EXIT_SUCCESS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-harness plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Failures are taken for independent. The formulas and their sources are in elastic_harness.planning. "
        "Figures of your own cluster are worth more than the defaults.",
    )
    add = parser.add_argument
    add("--nodes", type=int, metavar="N", help="machines that compute (default: 16)")
    add("--node-mtbf-days", type=float, metavar="D", help="days between failures of one machine (default: 30)")
    add("--hours", type=float, default=168.0, metavar="H", help="length of the run by the clock (default: 168)")
    add("--spares", type=int, default=0, metavar="K", help="machines that wait to take a lost one's place (default: 0)")
    add(
        "--replace-minutes",
        type=float,
        default=30.0,
        metavar="M",
        help="until a lost machine is replaced (default: 30)",
    )
    add("--snapshot-s", type=float, metavar="S", help="a snapshot in memory stops training so long (default: 0.5)")
    add("--checkpoint-s", type=float, metavar="S", help="and a checkpoint on disk (default: 30)")
    add("--upload-s", type=float, metavar="S", help="and one in object storage (default: 120)")
    add(
        "--restart-s",
        type=float,
        default=300.0,
        metavar="S",
        help="to notice a failure and start all workers again, without recovery in place (default: 300)",
    )
    add("--recovery-s", type=float, metavar="S", help="a recovery in place takes so long (default: 2)")
    add(
        "--outage-mtbf-days",
        type=float,
        default=30.0,
        metavar="D",
        help="days between failures of everything at once (default: 30)",
    )
    add("--price", type=float, metavar="X", help="of a machine for an hour, in any currency")
    add("--spot-price", type=float, metavar="X", help="of a spot machine for an hour")
    add("--spot-mtbf-hours", type=float, metavar="H", help="hours until a spot machine is taken away (default: 24)")
    add("--run", metavar="RUN", help="take what this run has measured where nothing else is given")
    add("--plot", metavar="FILE", help="draw the useful time over the number of machines (.svg, .png, .pdf)")
    add("--json", action="store_true", help="as one JSON object")
    return parser


def _check(given: argparse.Namespace) -> None:
    """Raise ConfigError for numbers that cannot be."""
    for name, least in (("nodes", 1), ("spares", 0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} is {value}; it must be at least {least}")
    costs = ("snapshot_s", "checkpoint_s", "upload_s")
    positive = ("node_mtbf_days", "hours", "outage_mtbf_days", "spot_mtbf_hours", *costs)
    others = ("replace_minutes", "restart_s", "recovery_s")
    for name in (*positive, *others, "price", "spot_price"):
        value, flag = getattr(given, name), f"--{name.replace('_', '-')}"
        if value is not None and not (math.isfinite(value) and (value > 0 if name in positive else value >= 0)):
            raise ConfigError(
                f"{flag} is {value:g}; it must be {'greater than 0' if name in positive else '0 or more'}"
            )
    if given.spot_price is not None and given.price is None:
        raise ConfigError("--spot-price is compared with the price on demand; give --price too")
    if given.spot_mtbf_hours is not None and given.spot_price is None:
        raise ConfigError("--spot-mtbf-hours is about spot machines; give --spot-price too")
    if given.plot and Path(given.plot).suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--plot is {given.plot}; its name must end in .svg, .png or .pdf")


def _measured(run: str) -> dict[str, Any]:
    """Return what a run's events say about the figures that a plan needs. Workers of a machine that are lost within
    TOGETHER_S are one failure. What a save costs the steps beside it is not in the events."""
    folders = named.of_run(run, EVENTS)
    events = sorted((each for folder in folders for each in read_events(folder / EVENTS)), key=lambda each: each["t"])
    found: dict[str, Any] = {}
    recoveries = [each["total_ms"] / 1e3 for each in events if each["event"] == "recovery" and not each.get("planned")]
    if recoveries:
        found["recovery_s"] = statistics.median(recoveries)
    failures, last = 0, dict[str, float]()
    for each in events:
        if each["event"] == "failure_detected" and each.get("exit_code") not in OWN_FAULTS:
            host = str(each.get("host"))
            failures += each["t"] - last.get(host, -math.inf) > TOGETHER_S
            last[host] = each["t"]
    began = [at for at, each in enumerate(events) if each["event"] == "run_started"]
    elapsed_s = sum(
        events[end - 1]["t"] - events[start]["t"]
        for start, end in zip(began, [*began[1:], len(events)], strict=True)
        if end > start
    )
    if failures and elapsed_s > 0:
        found["node_mtbf_days"] = max(len(folders), len(last)) * elapsed_s / failures / DAY_S
    return found


def _plan(given: argparse.Namespace, nodes: Nodes, costs: FailureCosts) -> dict[str, Any]:
    """Return all that the command tells, as plain values."""
    per_hour = -math.expm1(-HOUR_S / nodes.node_mtbf_s)
    made: dict[str, Any] = {
        "nodes": asdict(nodes),
        "costs": asdict(costs),
        "hours": given.hours,
        "failures_expected": given.hours * HOUR_S / nodes.mtbf_s,
        "failure_probability": planning.calculate_failure_probability(per_hour, nodes.count, given.hours),
        "mtbf_s": nodes.mtbf_s,
        "intervals": [_interval(tier, getattr(given, name), nodes.mtbf_s, costs) for tier, name in TIERS.items()],
        "strategies": [_told(each, nodes, given.hours, given.price) for each in planning.strategies(nodes, costs)],
    }
    if given.spot_price is not None:
        spot = replace(nodes, node_mtbf_s=given.spot_mtbf_hours * HOUR_S)
        made["spot"] = [_told(each, spot, given.hours, given.spot_price) for each in planning.strategies(spot, costs)]
    return made


def _interval(tier: str, cost_s: float, mtbf_s: float, costs: FailureCosts) -> dict[str, Any]:
    return {
        "tier": tier,
        "cost_s": cost_s,
        "young_s": planning.young_interval_s(cost_s, mtbf_s),
        "daly_s": planning.daly_interval_s(cost_s, mtbf_s),
        "available_s": planning.available_interval_s(cost_s, mtbf_s, costs.restart_s),
        "in_place_s": planning.daly_interval_s(cost_s, costs.outage_mtbf_s),
    }


def _told(strategy: Strategy, nodes: Nodes, hours: float, price: float | None) -> dict[str, Any]:
    told: dict[str, Any] = asdict(strategy)
    told["useful_node_hours"] = strategy.shares.useful * nodes.count * hours
    if price is not None:
        made = planning.bill(nodes, strategy.shares, hours, price)
        told["bill"] = {**asdict(made), "per_useful_node_hour": made.per_useful_node_hour(told["useful_node_hours"])}
    return told


# ---- as text


def _shown(made: dict[str, Any], given: argparse.Namespace, measured: dict[str, Any]) -> str:
    nodes = made["nodes"]
    lines = [
        f"{nodes['count']} machines{_spares(nodes['spares'])}, each failing once in {_span(nodes['node_mtbf_s'])}",
        f"  something fails every {_span(made['mtbf_s'])}: {made['failures_expected']:.3g} failures in "
        f"{given.hours:g} hours; at least one with probability {_part(made['failure_probability'])}",
    ]
    if measured:
        size = {"recovery_s": 1.0, "node_mtbf_days": DAY_S}
        named_as = {"recovery_s": "a recovery takes", "node_mtbf_days": "a machine fails once in"}
        told = ", ".join(f"{named_as[name]} {_span(value * size[name])}" for name, value in measured.items())
        lines.append(f"  measured in {given.run}: {told}")
    elif given.run:
        lines.append(f"  {given.run} has had no failure, so it has measured nothing")
    lines += ["", "Save every …        cost      Young      Daly  available   in place"]
    lines += [
        f"  {each['tier']:<16}{_span(each['cost_s']):>6}{_span(each['young_s']):>11}{_span(each['daly_s']):>10}"
        f"{_span(each['available_s']):>11}{_span(each['in_place_s']):>11}"
        for each in made["intervals"]
    ]
    lines += ["", *_table("What becomes of the time", made["strategies"])]
    if "spot" in made:
        lines += ["", *_table("On spot machines", made["spot"])]
    lines += ["", *(f"  {each['name']}: {each['what']}" for each in made["strategies"])]
    return "\n".join(lines)


def _table(title: str, told: Sequence[dict[str, Any]]) -> list[str]:
    parts = ("useful", "checkpoints", "repeated", "stopped", "missing")
    heads = "".join(f"{name:>13}" for name in parts)
    priced = "bill" in told[0]
    lines = [f"{title:<24}{heads}" + ("        bill   a useful hour" if priced else "")]
    for each in told:
        row = f"  {each['name']:<22}" + "".join(f"{_part(each['shares'][part]):>13}" for part in parts)
        if priced:
            row += f"{each['bill']['total']:>12,.0f}{each['bill']['per_useful_node_hour']:>16,.2f}"
        lines.append(row)
    return lines


def _spares(count: int) -> str:
    return f" and {count} spare{'s' * (count > 1)}" if count else ""


def _part(share: float) -> str:
    return f"{100 * share:.2f} %"


def _span(seconds: float) -> str:
    """Return a duration in the unit that fits."""
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _plot(path: Path, nodes: Nodes, costs: FailureCosts) -> None:
    """Draw the useful share over the number of machines."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'elastic-harness[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    of_all = [planning.strategies(replace(nodes, count=count), costs) for count in PLOTTED_NODES]
    for number, strategy in enumerate(of_all[0]):
        axes.plot(PLOTTED_NODES, [100 * each[number].shares.useful for each in of_all], marker="o", label=strategy.name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("machines")
    axes.set_ylabel("useful time, %")
    axes.set_title(f"A machine fails once in {_span(nodes.node_mtbf_s)}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _finite(value: Any) -> Any:
    """Return the value with null in place of what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
