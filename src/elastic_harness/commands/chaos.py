"""`elastic-harness chaos`: break a training job on purpose, in known ways, and judge whether anything was lost."""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_harness.chaos import plan as plans
from elastic_harness.chaos.kinds import KINDS, NEEDS
from elastic_harness.chaos.plan import ChaosPlan
from elastic_harness.chaos.rounds import PLAN, Calm, forget_checkpoints, play, train_undisturbed
from elastic_harness.chaos.shrink import shrink
from elastic_harness.chaos.verdict import ChaosVerdict
from elastic_harness.errors import EXIT_SUCCESS, ConfigError
from elastic_harness.watched_job import Terminated, signals_as_exceptions

EXIT_VERDICT_FAILED = 1
SHRUNK = "shrunk.yaml"
EPILOG = """\
examples
  elastic-harness chaos run --seed 3                      a job of its own, and 8 faults drawn from the seed
  elastic-harness chaos run --kinds kill,stop,flip-wire   these kinds only
  elastic-harness chaos run --minutes 60 --workers 4      plan after plan, for an hour
  elastic-harness chaos run --seed 3 -- train.py --lr 1   your own script, which uses elastic_harness.start()
  elastic-harness chaos run plan.yaml                     a plan written by hand
  elastic-harness chaos replay runs/chaos-…/round-0       what was done there, once more
  elastic-harness chaos shrink runs/chaos-…/round-0       the fewest faults with which the verdict still fails

exit codes: 0 the verdict holds, 1 it does not, 2 a wrong plan or command line, 4 the job fails undisturbed
"""


def main(argv: Sequence[str]) -> int:
    """Run, replay or shrink plans, or list the kinds of faults."""
    given = _parser().parse_args(_before_script(list(argv)))
    try:
        with signals_as_exceptions():
            return int(given.do(given, _script_of(argv)))
    except Terminated as stop:
        return stop.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-harness chaos",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="run|replay|shrink|list")
    run = commands.add_parser("run", help="carry out a plan, or plans drawn from seeds", allow_abbrev=False)
    run.add_argument("plan", nargs="?", type=Path, metavar="PLAN.yaml", help="a plan; without one it is drawn")
    run.add_argument("--seed", type=int, metavar="N", help="draw the plan from this (default: any, which is printed)")
    run.add_argument("--faults", type=int, metavar="N", help="in a plan (default: 8)")
    run.add_argument("--kinds", metavar="KIND,…", help="draw from these only (`chaos list` shows all)")
    run.add_argument("--workers", type=int, metavar="N", help="of the job (default: 3)")
    run.add_argument("--spares", type=int, metavar="N", help="warm spares of the job (default: 0)")
    run.add_argument("--store", action="store_true", default=None, help="give the job an etcd, and try that too")
    run.add_argument("--minutes", type=float, metavar="M", help="plans from one seed after the other, for so long")
    run.add_argument("--recovery", type=float, metavar="S", help="training must go on within S seconds (default: 60)")
    run.add_argument("--no-shrink", action="store_true", help="do not look for the fewest faults of a plan that fails")
    run.set_defaults(do=_run)
    for name, do, about in (
        ("replay", _replay, "carry out once more what was carried out in a folder"),
        ("shrink", _shrink, "find the fewest faults of a plan with which its verdict still fails"),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_argument("plan", type=Path, metavar="FOLDER|PLAN.yaml")
        command.set_defaults(do=do)
    for command in (run, *(commands.choices[name] for name in ("replay", "shrink"))):
        command.add_argument("--output", type=Path, metavar="DIR", help="default: a new folder runs/chaos-…")
        command.add_argument("--json", action="store_true", help="the verdict as one JSON object")
    listing = commands.add_parser("list", help="the kinds of faults", description="The kinds of faults.")
    listing.add_argument("--json", action="store_true", help="as one JSON list")
    listing.set_defaults(do=_list)
    return parser


def _before_script(argv: list[str]) -> list[str]:
    return argv[: argv.index("--")] if "--" in argv else argv


def _script_of(argv: Sequence[str]) -> tuple[str, ...]:
    return tuple(argv[list(argv).index("--") + 1 :]) if "--" in argv else ()


# ---- what is done


def _list(given: argparse.Namespace, script: Sequence[str]) -> int:
    if given.json:
        facts = ("name", "what", "codes", "places", "loses", "culprit", "needs", "workers_min")
        print(json.dumps([{fact: getattr(kind, fact) for fact in facts} for kind in KINDS]))
        return EXIT_SUCCESS
    for kind in KINDS:
        needs = [NEEDS[need] for need in kind.needs] + [f"{kind.workers_min} workers"] * (kind.workers_min > 2)
        noticed = ", ".join(kind.codes) or "no failure"
        print(f"{kind.name:<18}  {noticed:<26}  {kind.what}" + (f"  (needs {', '.join(needs)})" if needs else ""))
    return EXIT_SUCCESS


def _run(given: argparse.Namespace, script: tuple[str, ...]) -> int:
    if given.plan is not None:
        drawn = {
            name: getattr(given, name) for name in ("seed", "faults", "kinds", "workers", "spares", "store", "minutes")
        }
        odd = [f"--{name}" for name, value in drawn.items() if value is not None]
        if odd or script:
            raise ConfigError(f"{given.plan} says all about the job and its faults; leave {', '.join(odd) or '--'} out")
        return _Campaign.of(given).carry_out([_load(given.plan)], shrinks=not given.no_shrink)
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    count = 8 if given.faults is None else given.faults
    if count < 1:
        raise ConfigError(f"--faults is {count}; it must be at least 1")
    workers, spares = 3 if given.workers is None else given.workers, given.spares or 0
    campaign = _Campaign.of(given)
    job: dict[str, Any] = {"workers": workers, "spares": spares, "command": script, "store": bool(given.store)}
    job |= {} if given.recovery is None else {"recovery_s": given.recovery}
    steps, slots = plans.steps_for(count), 0 if script else plans.SLOTS
    names = tuple((given.kinds or "").split(",")) if given.kinds else ()
    first = plans.draw(seed, faults=count, steps=steps, slots=slots, names=names, **job)  # wrong arguments show here
    if script:
        steps = campaign.undisturbed(replace(first, faults=())).steps

    def drawn_plans() -> Iterator[ChaosPlan]:
        end = time.monotonic() + 60 * (given.minutes or 0)
        number = seed
        while number == seed or time.monotonic() < end:
            yield plans.draw(number, faults=count, steps=steps, slots=slots, names=names, **job)
            number += 1

    return campaign.carry_out(drawn_plans(), shrinks=not given.no_shrink)


def _replay(given: argparse.Namespace, script: Sequence[str]) -> int:
    return _Campaign.of(given).carry_out([_load(given.plan)], shrinks=False)


def _shrink(given: argparse.Namespace, script: Sequence[str]) -> int:
    campaign = _Campaign.of(given)
    small = campaign.shrink(_load(given.plan))
    if small is None:
        campaign.say("the verdict holds with this plan; there is nothing to shrink")
        return EXIT_SUCCESS
    return EXIT_VERDICT_FAILED


def _load(path: Path) -> ChaosPlan:
    path = path / PLAN if path.is_dir() else path
    try:
        return plans.from_yaml(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error.strerror}; name a plan, or a folder of a round"
        ) from error


@dataclass
class _Campaign:
    """Rounds in one folder. Runs of the same job are compared with one undisturbed run."""

    folder: Path
    as_json: bool
    _calm: tuple[ChaosPlan, Calm] | None = None

    @staticmethod
    def of(given: argparse.Namespace) -> _Campaign:
        folder = given.output or Path("runs") / time.strftime("chaos-%Y%m%d-%H%M%S")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--output is {folder}, which is not empty; name a new folder")
        return _Campaign(folder.resolve(), given.json)

    def say(self, text: str) -> None:
        if not self.as_json:
            print(text, flush=True)

    def undisturbed(self, plan: ChaosPlan) -> Calm:
        job = ChaosPlan((), steps=1 if plan.command else plan.steps, command=plan.command, settings=plan.settings)
        if self._calm is None or self._calm[0] != job:
            number = len(list(self.folder.glob("undisturbed-*[0-9]"))) if self.folder.is_dir() else 0
            self.say("the job, undisturbed …")
            self._calm = job, train_undisturbed(plan, self.folder / f"undisturbed-{number}")
        return self._calm[1]

    def carry_out(self, rounds: Iterator[ChaosPlan] | Sequence[ChaosPlan], *, shrinks: bool) -> int:
        """Carry out and judge plans until one fails."""
        played: list[tuple[ChaosPlan, ChaosVerdict]] = []
        small = None
        try:
            for plan in rounds:
                calm = self.undisturbed(plan)
                here = self.folder / f"round-{len(played)}"
                seed = "" if plan.seed is None else f", seed {plan.seed}"
                self.say(f"round {len(played)}{seed}: {', '.join(fault.kind for fault in plan.faults)}")
                outcome = play(plan, calm, here)
                played.append((plan, outcome))
                self._tell(outcome)
                if not outcome.ok:
                    small = self.shrink(plan) if shrinks and len(plan.faults) > 1 else None
                    break
                forget_checkpoints(here)
        finally:  # also of what was done until Ctrl-C
            if played:
                self._report(played, small)
        return EXIT_SUCCESS if all(outcome.ok for _, outcome in played) else EXIT_VERDICT_FAILED

    def shrink(self, plan: ChaosPlan) -> ChaosPlan | None:
        """Return the smallest plan that still fails, None if this one does not; it is written down as well."""
        calm = self.undisturbed(plan)

        def fails(tried: ChaosPlan) -> bool:
            number = len(list(self.folder.glob("shrink-*")))
            self.say(f"shrinking: {', '.join(fault.kind for fault in tried.faults)}")
            return not play(tried, calm, self.folder / f"shrink-{number}").ok

        small = shrink(plan, fails)
        if small is not None:
            path = self.folder / SHRUNK
            path.write_text(plans.to_yaml(small))
            self.say(f"{len(small.faults)} of {len(plan.faults)} faults make it fail: "
                     f"{', '.join(fault.kind for fault in small.faults)}\n"
                     f"do it again: elastic-harness chaos replay {path}")  # fmt: skip
        return small

    def _tell(self, outcome: ChaosVerdict) -> None:
        for check in outcome.checks.values():
            self.say(f"  {'✓' if check.holds else '✗'} {check.claim}: {check.evidence}")

    def _report(self, played: Sequence[tuple[ChaosPlan, ChaosVerdict]], small: ChaosPlan | None) -> None:
        from elastic_harness.chaos import report

        facts = report.facts(played, small)
        (self.folder / report.JSON).write_text(json.dumps(facts, indent=1) + "\n")
        page = report.write(self.folder, facts)
        if self.as_json:
            print(json.dumps(facts))
            return
        for path in (self.folder / report.JSON, *page):
            self.say(f"  report: {path}")
        times = facts["recoveries_s"]
        if times["count"]:
            self.say(f"  recovery: p50 {times['p50']:.2f} s, p95 {times['p95']:.2f} s, worst {times['worst']:.2f} s; "
                     f"a healthy step: {facts['healthy_step_s']:.2f} s")  # fmt: skip
        self.say(f"VERDICT: {'nothing was lost' if facts['ok'] else 'it does NOT hold'} "
                 f"({facts['faults']} faults of {len(facts['kinds'])} kinds in {len(played)} rounds)")  # fmt: skip
