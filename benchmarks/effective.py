"""How much of its time a job trains, under published failure rates: recovering in place, or restarting. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

HOUR_S = 3600.0
LLAMA_GPU_HOURS = 54 * 24 * 16_384 / 419  # Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs
RSC = ((1024, 7.9), (16_384, 1.8))  # GPUs, hours to a failure: Meta's research clusters, arXiv 2410.21680
DETECT_S = 3.0  # a lost node, at most: --node-timeout
COMMIT_S = 0.52  # from a death to the next committed step: median of benchmarks/results/recovery.json
TRAINMOVER_S = 20.0  # a published recovery in place, at 1,024 GPUs
RESTART_S = 150.0  # FlashRecovery at 4,800 devices, arXiv 2509.03047: fast for a restart
LLAMA_SHARE = 0.90  # of effective training time; "over 90 %"
SIZES = (10, 100, 1000, 2000, 4000, 10_000, 16_384)


def mttf_s_llama(workers: int) -> float:
    """Failures come in proportion to the GPUs."""
    return HOUR_S * LLAMA_GPU_HOURS / workers


def mttf_s_rsc(workers: int) -> float:
    """In proportion to the GPUs up to 1,024, then along the power law through the two published points."""
    (few, hours), (many, fewer_hours) = RSC
    power = math.log(hours / fewer_hours) / math.log(many / few) if workers > few else 1.0
    return HOUR_S * hours * (few / workers) ** power


def in_place(mttf_s: float, stopped_s: float) -> float:
    """The share of time that is training if every failure stops it for `stopped_s` and nothing else is lost."""
    return mttf_s / (mttf_s + stopped_s)


def restart(mttf_s: float, restart_s: float, checkpoint_s: float) -> float:
    """The same if every failure costs a restart and half an interval of work, and checkpoints cost `checkpoint_s` each,
    taken at Young's interval √(2·C·F) (Communications of the ACM 17, 1974), first order in both."""
    interval_s = math.sqrt(2 * checkpoint_s * mttf_s)
    return max(0.0, 1.0 - checkpoint_s / interval_s - (restart_s + interval_s / 2) / mttf_s)


def checkpoint_cost_s() -> float:
    """At which `restart` gives Llama 3's share on its 16,384 GPUs: 1 − R/F − √(2·C/F) = 0.9, solved for C. It reports
    more than that, so its checkpoints cost less, or its restarts more."""
    mttf_s = mttf_s_llama(16_384)
    return mttf_s / 2 * (1.0 - LLAMA_SHARE - RESTART_S / mttf_s) ** 2


def table(agreement_s: Mapping[int, float], extrapolated: Collection[int] = ()) -> list[dict[str, Any]]:
    """`agreement_s`: after the loss of a node, by workers, some of them `extrapolated`; between them that of the next
    larger one that is known."""
    rows = []
    for workers in SIZES:
        known = min((w for w in agreement_s if w >= workers), default=max(agreement_s))
        stopped_s = DETECT_S + agreement_s[known] + COMMIT_S
        row: dict[str, Any] = {"workers": workers, "extrapolated": known in extrapolated, "stopped_s": stopped_s}
        for name, mttf_s in (("llama", mttf_s_llama(workers)), ("rsc", mttf_s_rsc(workers))):
            row[name] = {
                "mttf_h": mttf_s / HOUR_S,
                "restart": restart(mttf_s, RESTART_S, checkpoint_cost_s()),
                "in_place_20_s": in_place(mttf_s, TRAINMOVER_S),
                "in_place": in_place(mttf_s, stopped_s),
            }
        rows.append(row)
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| Workers | Llama 3: hours to a failure | restart | in place, 20 s | in place, ours | "
        "RSC: hours to a failure | restart | in place, 20 s | in place, ours |",
        "|--:|" + "--:|" * 8,
    ]
    for row in rows:
        cells = [
            cell
            for each in (row["llama"], row["rsc"])
            for cell in (
                f"{each['mttf_h']:,.1f}",
                *(f"{100 * each[name]:.3f} %" for name in ("restart", "in_place_20_s", "in_place")),
            )
        ]
        mark = " *" if row["extrapolated"] else ""
        lines.append(f"| {row['workers']:,}{mark} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
