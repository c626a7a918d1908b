"""The page about chaos, docs/chaos.md. It is written by `make docs` and never by hand."""

from __future__ import annotations

from elastic_harness.chaos.kinds import KINDS, NEEDS, Kind
from elastic_harness.chaos.verdict import CHECKS

_HEAD = """\
<!-- Made from src/elastic_harness/chaos/ by `make docs`. Change the table of kinds, not this page. -->

# Chaos

Break a training job on purpose, and have it judged whether anything was lost. Try it before you pay for weeks of
machines.

```
elastic-harness chaos run --seed 3                        # a job of its own, and 8 faults drawn from the seed
elastic-harness chaos run --kinds kill,stop,flip-wire     # these kinds only
elastic-harness chaos run --minutes 60 --workers 4        # plan after plan, each from the next seed
elastic-harness chaos run --seed 3 -- train.py --lr 0.1   # your own script, which uses elastic_harness.start()
elastic-harness chaos run --store                         # the job has an etcd, which fails as well
elastic-harness chaos list
```

Each plan is carried out in one run, and that run is compared with one of the same training to which nothing was done.
Exit code 0: the verdict holds. 1: it does not. 2: the plan or the command line is wrong. 4: the job fails undisturbed.
The folder (`--output`, else `runs/chaos-…`) has `chaos.json` and, with matplotlib, `chaos.html`: every check, every
kind, and how long it took until training went on. In `round-0/` are the plan, the run, and what happened to whom.

## Plans

```yaml
workers: 3
steps: 60
faults:
- {kind: kill, step: 8, place: exchange.header_sent}   # whoever passes this place first from step 8 on
- {kind: stop, step: 24, place: slot.forward, slot: 5} # whoever computes slot 5
- {kind: flip-wire, step: 40, worker: 1}               # the worker at place 1
- {kind: kill-agent, step: 40, at_once: true}          # does not wait for the recovery from the fault before it
```

`elastic-harness chaos run plan.yaml` carries it out. A job without `command` is the built-in trainer with a tiny model
and the `settings` of the plan. A fault waits until all workers are there again after the fault before it, so that what
is told can be put down to one of them.

A plan that fails is shrunk by itself to the fewest faults with which it still fails (`--no-shrink`: it is not).
`elastic-harness chaos replay FOLDER` does once more what was done there; `elastic-harness chaos shrink FOLDER` shrinks
a plan later. Workers do not run in lockstep, so a fault that depends on a moment may need several replays.

## The verdict
"""

_AFTER_CHECKS = """
A fault that did not happen counts as failed: a plan with which nothing was tried proves nothing. A fault is noticed if
its code is told of the member that it happened to. `EH-L101` and `EH-L105` may come before it, because whether an
exchange breaks first depends on moments. Alarms and slow workers are never held against a run: they may be true.

Whether the verdict can be red is tested: `tests/mutants/product.py` plants mistakes in the product, among them
detectors that are turned off, and each of them has to turn its checks red.

## Failures in a run of your own

```yaml
chaos:
  probability: 0.001   # with which a worker fails in a step
  after_step: 100
  action: kill         # or stop, raise, crash, loop
```

Any run that `elastic-harness launch` starts takes this section. Nobody judges it, but `verify`, `explain` and `report`
tell of it as of any run.

`scripts/chaos_test.py --interval 15 --duration 300 --rto-threshold 10 --output results.json` kills workers of a job of
its own, or of a live one (`--run RUN`), now and then, and measures each recovery.

## Kinds of faults

*Lost* says who ends: the worker, several or all workers, the whole job (which is launched again), or nobody. Where a
kind may break a check by its nature, the check is left out: who goes back to a checkpoint computes steps again.

| Kind | What it does | Noticed with | Lost | Not judged | Needs |
|---|---|---|---|---|---|
"""

_TAIL = """
## What is not here

Jobs on several nodes. Cut, slow and one-way networks, and whole nodes that vanish, are tried by
`tests/soak/test_storm_of_hosts.py`, `tests/integration/test_hosts.py` and the simulator (`elastic-harness simulate`),
not by `chaos`. So are memory limits (`tests/integration/test_out_of_memory.py`), a file system that is really full
(`tests/integration/test_full_disk.py`), damaged token indexes, and the metadata services of clouds
(`tests/integration/test_drain.py`). Nobody sets the clock of a machine here.

A worker that adds up wrong in one part of the sum alone is noticed when an audit comes to that part, and the run then
goes back to the last audit, which may have looked at another part. So the kind `flip-sum` damages all parts.
"""


def page() -> str:
    """Return the page."""
    checks = "\n".join(f"- **{name}**: {claim}" for name, claim in CHECKS.items())
    rows = "\n".join(map(_row, KINDS))
    return f"{_HEAD}\n{checks}\n{_AFTER_CHECKS}{rows}\n{_TAIL}"


def _row(kind: Kind) -> str:
    needs = [NEEDS[need] for need in kind.needs] + [f"{kind.workers_min} workers"] * (kind.workers_min > 2)
    codes = " or ".join(kind.codes) or "it is no failure"
    cells = (f"`{kind.name}`", kind.what, codes, kind.loses, ", ".join(kind.breaks), ", ".join(needs))
    return "| " + " | ".join(cells) + " |"
