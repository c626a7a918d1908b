"""What a failure costs in jobs of 10 to 10,000 workers, and how much of their time they train: simulated with the
production nodes (`scale_model.py`), the largest sizes extrapolated.

    python -m benchmarks.scale [--sizes 10,100,1000,2000,4000] [--repeats 3]

Writes results/scale.json and, if matplotlib is there, docs/scale.svg.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish, say
from benchmarks.scale_model import EXTRAPOLATED, as_text, report

PLOT = ROOT / "docs" / "scale.svg"
COLOURS = {"a worker": "#d9480f", "a node": "#1864ab", "the leader's node": "#2b8a3e"}


def plot(result: dict[str, Any], path: Path) -> None:
    """Time to agree, and training time, over the number of workers. What is extrapolated has open circles."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from elastic_harness.report.plots import STYLE

    with rc_context({**STYLE, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.5, 3.6), layout="constrained")
        agreed, trained = figure.subplots(1, 2)
        for failure, colour in COLOURS.items():
            rows = [row for row in result["failures"] if row["failure"] == failure]
            agreed.plot([r["workers"] for r in rows], [r["seconds"] for r in rows], color=colour, lw=1.2, label=failure)
            for row in rows:
                face = "white" if row["extrapolated"] else colour
                agreed.plot(row["workers"], row["seconds"], "o", ms=4, color=colour, mfc=face)
        agreed.plot([], [], "o", ms=4, color="#868e96", mfc="white", label="extrapolated")
        agreed.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds", title="Agreed after the loss of")
        agreed.legend(fontsize=8)
        table = result["effective_training_time"]
        workers = [row["workers"] for row in table]
        for name, label, colour, style in (
            ("llama", "Llama 3's failures", "#1864ab", "-"),
            ("rsc", "failures of Meta's research clusters", "#d9480f", "-"),
        ):
            trained.plot(
                workers, [100 * row[name]["in_place"] for row in table], style, color=colour, lw=1.6, label=label
            )
            trained.plot(workers, [100 * row[name]["restart"] for row in table], "--", color=colour, lw=1.2)
        trained.plot([], [], "-", color="#868e96", label="in place")
        trained.plot([], [], "--", color="#868e96", label="restart from a checkpoint")
        trained.set(xscale="log", xlabel="workers", ylabel="% of time", title="Effective training time (model)")
        trained.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,1000,2000,4000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    result = report([int(size) for size in args.sizes.split(",")], EXTRAPOLATED, args.repeats, say)
    finish("scale", result, args.out)
    say("\n" + as_text(result))
    if args.plot or not args.out:
        try:
            plot(result, args.plot or PLOT)
        except ImportError:
            say("no plot: matplotlib is not installed (pip install 'elastic-harness[report]')")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
