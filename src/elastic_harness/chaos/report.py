"""What chaos found, as JSON and as a page that needs nothing else."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_harness.chaos.kinds import TABLE
from elastic_harness.chaos.plan import ChaosPlan
from elastic_harness.chaos.verdict import ChaosVerdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JSON, HTML = "chaos.json", "chaos.html"


def facts(played: Sequence[tuple[ChaosPlan, ChaosVerdict]], small: ChaosPlan | None) -> dict[str, Any]:
    """Return all that is known of some rounds. small: the smallest plan that still fails."""
    outcomes = [outcome for _, outcome in played]
    times = [value for outcome in outcomes for value in outcome.recoveries_s]
    steps = [outcome.healthy_step_s for outcome in outcomes if outcome.healthy_step_s is not None]
    return {
        "ok": bool(outcomes) and all(outcome.ok for outcome in outcomes),
        "faults": sum(len(outcome.faults) for outcome in outcomes),
        "kinds": _of_kinds(outcomes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "took_s": sum(outcome.took_s for outcome in outcomes),
        "healthy_step_s": statistics.median(steps) if steps else None,
        "recoveries_s": distribution(times),
        "rounds": [{"seed": plan.seed, "workers": plan.workers, "spares": plan.spares, **outcome.to_json()}
                   for plan, outcome in played],
        "shrunk": None if small is None else [asdict(fault) for fault in small.faults],
    }  # fmt: skip


def distribution(times: Sequence[float]) -> dict[str, float | int | None]:
    """Return how many times there are, and their quantiles."""
    ordered = sorted(times)

    def quantile(part: float) -> float | None:
        return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None

    return {"count": len(ordered), "p50": quantile(0.5), "p95": quantile(0.95), "worst": max(ordered, default=None)}


def _of_kinds(outcomes: Sequence[ChaosVerdict]) -> dict[str, dict[str, Any]]:
    """Return for each kind how often it was carried out, with which codes it was noticed, and when training went on."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        for fault in outcome.faults:
            here = found.setdefault(fault.kind, {"faults": 0, "happened": 0, "codes": Counter(), "times": []})
            here["faults"] += 1
            here["happened"] += bool(fault.happened)
            here["codes"].update(fault.codes)
            here["times"] += [] if fault.after_s is None else [fault.after_s]
    return {
        name: {**here, "codes": dict(here["codes"]), "times": distribution(here["times"])}
        for name, here in sorted(found.items())
    }


def write(folder: Path, told: Mapping[str, Any]) -> tuple[Path, ...]:
    """Write the page, and return its path; without matplotlib there is none."""
    try:
        from elastic_harness.report import page
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return ()
    times = [value for each in told["rounds"] for value in each["recoveries_s"]]
    pictures = [page.picture((9.6, 3.4), "From a fault to the next step", lambda figure: _draw(figure, times, told))]
    bad = [check for each in told["rounds"] for check in each["checks"].values() if not check["holds"]]
    headline = (
        f"{told['faults']} faults of {len(told['kinds'])} kinds, nothing lost" if told["ok"]
        else f"the verdict does NOT hold: {bad[0]['claim'] if bad else 'no round was carried out'}"
    )  # fmt: skip
    spread = told["recoveries_s"]
    shown = [
        (str(told["faults"]), f"faults, in {len(told['rounds'])} rounds"),
        (str(told["steps"]), "steps committed, each with its full batch"),
        *((_s(spread[name]), f"{name} from a fault to the next step") for name in ("p50", "p95", "worst")),
        (_s(told["healthy_step_s"]), "a healthy step, median"),
    ]
    checks = [
        (str(number), ("holds" if check["holds"] else "FAILS") + ": " + check["claim"], check["evidence"])
        for number, each in enumerate(told["rounds"])
        for check in each["checks"].values()
    ]
    kinds = [
        (name, str(kind["faults"]), str(kind["happened"]), ", ".join(kind["codes"]) or "–",
         _s(kind["times"]["p50"]), _s(kind["times"]["worst"]), TABLE[name].what)
        for name, kind in told["kinds"].items()
    ]  # fmt: skip
    body = "\n".join(
        [
            page.tiles(shown),
            "<h2>How long until training went on</h2>",
            *pictures,
            "<h2>Every kind</h2>",
            page.table(("kind", "planned", "happened", "noticed with", "p50", "worst", "what it does"), kinds),
            "<h2>Every check</h2>",
            page.table(("round", "check", "evidence"), checks),
        ]
    )
    about = "Each run with faults is compared with one of the same training to which nothing was done."
    path = folder / HTML
    path.write_text(page.page("elastic-harness chaos", headline, about, body, good=told["ok"]), encoding="utf-8")
    return (path,)


def _s(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _draw(figure: Figure, times: Sequence[float], told: Mapping[str, Any]) -> None:
    """Draw which share of the faults was over after which time."""
    axes = figure.subplots()
    ordered = sorted(times)
    if ordered:
        axes.step(ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], where="post", label="faults")
    if told["healthy_step_s"]:
        axes.axvline(told["healthy_step_s"], linestyle=":", label="a healthy step")
    axes.set_xlabel("seconds from the fault to the next committed step")
    axes.set_ylabel("share of faults")
    axes.set_ylim(0, 1.02)
    if ordered:
        axes.set_xscale("log")
    axes.legend()
