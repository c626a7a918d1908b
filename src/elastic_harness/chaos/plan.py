"""Plans: which faults happen in a job, when and to whom. Drawn from a seed, or read from YAML. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from elastic_harness.chaos.kinds import KINDS, NEEDS, TABLE, Kind
from elastic_harness.errors import ConfigError
from elastic_harness.shape import build

FIRST_STEP, LAST_STEPS, STEPS_FOR_A_FAULT = 6, 20, 16
LATE_STEPS, LATE_PAUSE_S = 3, 0.3  # from so many steps after its own on, a fault that has to wait slows the job down
OPENED_EARLIER = 2  # steps by which a fault is let happen before its own, so that it is not late
MODULE, SLOTS = "elastic_harness.train", 12
SETTINGS = (
    "training.global_batch_samples=12",
    "training.lanes=12",
    "trainer.log_interval_steps=1000",
    "data.seq_length=16",
    "model.n_layer=1",
    "model.n_head=2",
    "model.d_model=64",
    "scheduler.warmup_steps=3",
    "checkpoint.checkpoint_interval=4",
    "checkpoint.memory_snapshot_interval=2",
    "checkpoint.keep_last=20",
    "elastic.first_step_timeout_s=30",
    "health.audit_interval=2",
)
"""Of the job that is disturbed unless another one is named: the built-in trainer with a model of some thousand
weights."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault: its kind, from which step on it is due, and whom it is aimed at. worker: the number of a worker's
    place; None: whoever comes first. slot: whoever computes it."""

    kind: str
    step: int
    worker: int | None = None
    place: str = ""  # one of the kind's; empty: its first
    slot: int | None = None
    at_once: bool = False  # it does not wait until the job has recovered from the fault before it


@dataclass(frozen=True)
class ChaosPlan:
    """A job, and the faults that happen in it, in the order of their steps."""

    faults: tuple[PlannedFault, ...]
    workers: int = 3
    spares: int = 0
    steps: int = 60  # that the job does; of a script of one's own: as it did undisturbed
    command: tuple[str, ...] = ()  # a script with its arguments; empty: the built-in trainer with `settings`
    settings: tuple[str, ...] = SETTINGS
    store: bool = False  # whether the job has an etcd of its own
    recovery_s: float = 60.0  # within which training must go on after each fault
    seed: int | None = None  # from which it was drawn

    def kind(self, number: int) -> Kind:
        return TABLE[self.faults[number].kind]


def check(plan: ChaosPlan) -> ChaosPlan:
    """Return the plan. Raises ConfigError, which names the fault, its value and what is allowed."""
    for name, least in (("workers", 1), ("spares", 0), ("steps", 1)):
        if getattr(plan, name) < least:
            raise ConfigError(f"{name} is {getattr(plan, name)}; it must be at least {least}")
    if not plan.recovery_s > 0:
        raise ConfigError(f"recovery_s is {plan.recovery_s}; it must be above 0")
    for number, fault in enumerate(plan.faults):
        _check_fault(plan, f"fault {number} ({fault.kind})", fault)
    for number in range(len(plan.faults) - 1):
        if plan.kind(number).comes_last and not plan.faults[number + 1].at_once:
            raise ConfigError(
                f"fault {number} ({plan.faults[number].kind}) happens after the last step, so the fault after it never "
                "would; put it at the end"
            )
    evicting = sum(plan.kind(number).evicts for number in range(len(plan.faults)))
    if evicting > max(0, plan.workers - 2):
        raise ConfigError(
            f"{evicting} faults make workers compute other bits, and each of them is sent away for good; with "
            f"{plan.workers} workers there can be {max(0, plan.workers - 2)}, because three must be there to "
            "decide. Use more workers, or fewer of these faults"
        )
    return plan


def _check_fault(plan: ChaosPlan, name: str, fault: PlannedFault) -> None:
    kind = TABLE.get(fault.kind)
    if kind is None:
        close = difflib.get_close_matches(fault.kind, TABLE, n=1)
        hint = f"did you mean {close[0]}?" if close else "`elastic-harness chaos list` shows all"
        raise ConfigError(f"{name}: there is no kind {fault.kind!r}; {hint}")
    if not 0 <= fault.step < plan.steps:
        raise ConfigError(f"{name}: step is {fault.step}; the job has the steps 0 to {plan.steps - 1}")
    if fault.place and fault.place not in kind.places:
        allowed = ", ".join(kind.places) or "it is not aimed at a place, so leave it out"
        raise ConfigError(f"{name}: place is {fault.place!r}; allowed: {allowed}")
    if (fault.worker is not None or fault.slot is not None) and not kind.is_aimed:
        raise ConfigError(f"{name}: it cannot be aimed at a worker or a slot; leave `worker` and `slot` out")
    if fault.worker is not None and not 0 <= fault.worker < plan.workers + plan.spares:
        raise ConfigError(f"{name}: worker is {fault.worker}; the job has 0 to {plan.workers + plan.spares - 1}")
    if fault.slot is not None and not (fault.place or kind.places[0]).startswith("slot."):
        raise ConfigError(f"{name}: slot is {fault.slot}; only a fault at a place slot.… can be aimed at a slot")
    if plan.workers < kind.workers_min:
        raise ConfigError(f"{name}: it needs {kind.workers_min} workers; the job has {plan.workers}")
    if "spare" in kind.needs and not plan.spares:
        raise ConfigError(f"{name}: it needs {NEEDS['spare']}; the job has none")
    if "store" in kind.needs and not plan.store:
        raise ConfigError(f"{name}: it needs {NEEDS['store']}; give the plan `store: true`")


def drawable(workers: int, spares: int, names: Sequence[str] = (), *, store: bool = False) -> list[Kind]:
    """Return the kinds that can happen in such a job; of these names only, if there are any."""
    return [
        kind
        for kind in KINDS
        if kind.workers_min <= workers
        and (spares or "spare" not in kind.needs)
        and (store or "store" not in kind.needs)
        and (not names or kind.name in names)
    ]


def steps_for(faults: int) -> int:
    """Return how many steps a job does in which so many faults happen."""
    return FIRST_STEP + STEPS_FOR_A_FAULT * faults + LAST_STEPS


def draw(
    seed: int,
    *,
    faults: int,
    steps: int,
    workers: int,
    spares: int = 0,
    slots: int = 0,
    names: Sequence[str] = (),
    **job: Any,
) -> ChaosPlan:
    """Return a plan with so many faults, of these kinds or of all that fit the job. No kind comes a second time before
    all have come; of those that make a worker compute other bits there is one, the last. slots: of a step, 0 if that is
    not known. The same arguments give the same plan."""
    chance = random.Random(f"chaos {seed}")
    unknown = [name for name in names if name not in TABLE]
    if unknown:
        raise ConfigError(f"there is no kind {unknown[0]!r}; `elastic-harness chaos list` shows all")
    fitting = drawable(workers, spares, names, store=job.get("store", False))
    if not fitting:
        raise ConfigError(f"none of {', '.join(names)} fits {workers} workers and {spares} spares")
    last = [chance.choice(evicting)] if (evicting := [kind for kind in fitting if kind.evicts]) else []
    others = [kind for kind in fitting if not kind.evicts]
    chosen: list[Kind] = []
    while others and len(chosen) < faults - len(last):
        chosen += chance.sample(others, len(others))
    chosen = [*chosen[: max(0, faults - len(last))], *last][:faults]  # after it there is a worker less
    chosen.sort(key=lambda kind: kind.comes_last)
    begin, end = min(FIRST_STEP, steps - 1), max(1, steps - LAST_STEPS)
    band = (end - begin) / max(1, len(chosen))
    found = []
    for number, kind in enumerate(chosen):
        step = max(0, min(steps - 1, int(begin + (number + 0.5 * chance.random()) * band)))
        place = chance.choice(kind.places) if kind.places else ""
        slot = chance.randrange(slots) if slots and place.startswith("slot.") else None
        found.append(PlannedFault(kind.name, step, None, place, slot))
    return check(ChaosPlan(tuple(found), workers=workers, spares=spares, steps=steps, seed=seed, **job))


# ---- rules for the processes of the job


def fault_id(number: int, part: int = 0) -> str:
    """Return the name under which a process writes down that a part of a fault happened to it."""
    return f"f{number}-{part}"


def gate(number: int) -> str:
    """Return the name under which is written down that a fault may happen from now on."""
    return f"go{number}"


def rules(plan: ChaosPlan) -> str:
    """Return the rules that the processes of the job are given, as failpoints.py reads them."""
    made = ["lane.finished times=1000000 note"]
    for number, fault in enumerate(plan.faults):
        kind = plan.kind(number)
        made.append(
            f"step.begun from={fault.step + LATE_STEPS} until={gate(number)} times=1000000 pause:{LATE_PAUSE_S}"
        )
        for part, rule in enumerate(kind.rules):
            place = rule.place or fault.place or kind.places[0]
            member = rule.who.format(worker="*" if fault.worker is None else fault.worker)
            words = [place, f"member={member}", f"from={fault.step}", f"once={fault_id(number, part)}"]
            words += [f"slot={fault.slot}"] if fault.slot is not None and part == 0 else []
            words += [f"after={fault_id(number, part - 1) if part else gate(number)}"]
            made.append(" ".join([*words, *rule.conditions.split(), rule.action]))
    return "; ".join(made)


# ---- YAML


def _check_fields(cls: type, given: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no field {name}; there are {', '.join(known)}")


def to_yaml(plan: ChaosPlan) -> str:
    """Return a plan as YAML, which `from_yaml` reads back as an equal one."""
    plain = dataclasses.asdict(plan)
    plain["faults"] = [
        {name: value for name, value in vars(fault).items() if value not in (None, "")} for fault in plan.faults
    ]
    plain |= {name: list(plain[name]) for name in ("command", "settings")}
    return yaml.safe_dump(plain, sort_keys=False)


def from_yaml(text: str, name: str) -> ChaosPlan:
    """Return the plan that a text holds. name: of the file, for errors. Raises ConfigError."""
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {re.sub(chr(10), ' ', str(error))}") from error
    if not isinstance(given, Mapping) or "faults" not in given:
        raise ConfigError(f"{name} must be a mapping with `faults`, a list such as [{{kind: kill, step: 5}}]")
    try:
        _check_fields(ChaosPlan, given)
        for fault in given["faults"] or () if isinstance(given["faults"], list) else ():
            _check_fields(PlannedFault, fault if isinstance(fault, Mapping) else {})
        return check(build(ChaosPlan, dict(given)))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{name}: {error}") from error
