"""Proof, from a run's own records, that every sample was used exactly once, or the first place where it was not.

`verify` recomputes from seed and step alone which samples each slot must have read, and compares that with what the
ledger says was read. It follows the last lineage after a restore, and counts every sample of every epoch. Wherever a
worker took over the whole state, from a peer or a checkpoint, both sides must have held the same state. It needs no
torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from elastic_harness.batch_changes import listed
from elastic_harness.data.mixture import order_of
from elastic_harness.data.order import EpochOrder, Order, SamplePlaces, ids_of
from elastic_harness.data.schedule import Schedule
from elastic_harness.errors import EXIT_SUCCESS, ConfigError, HarnessError
from elastic_harness.omissions import Omission, Omitted, as_omissions, omitted
from elastic_harness.runs import origin as origins
from elastic_harness.runs.events import EVENTS, passed_over, read_events
from elastic_harness.runs.ledger import (
    LEDGER,
    Ledger,
    LedgerEntry,
    LedgerLine,
    ids_hash,
    lanes_covered_once,
    read_ledger,
)
from elastic_harness.runs.named import of_run
from elastic_harness.runs.origin import Origin
from elastic_harness.scaling.rules import ScaledRate, ScalingRule
from elastic_harness.shape import build

EXIT_VIOLATED = 1
_READ = ("run_started", "run_configured", "run_finished", "worker_joined", "generation")
_IDENTITY = ("seed", "n_samples", "slots", "lanes", "micro_batch_samples", "global_batch_samples")
_BEGINNING = ("first_step", "first_position")  # 0 where an event does not have them


@dataclass(frozen=True)
class RunIdentity:
    """The numbers that decide which sample each slot of each step reads, from the `run_configured` event. A run that
    goes on from another begins at `first_step` with `first_position`."""

    seed: int
    n_samples: int
    slots: int
    lanes: int
    micro_batch_samples: int
    global_batch_samples: int
    first_step: int
    first_position: int
    order: Order
    batches: BatchRules | None = None  # None: all steps have the same batch

    def schedule(self, lines: Mapping[int, LedgerLine]) -> Schedule:
        """Return which positions each step was to read. If the batch follows the workers, the lines say how."""
        first = Schedule(self.n_samples, self.global_batch_samples, self.first_step, self.first_position)
        if self.batches is None:
            return first
        if not self.batches.slots_per_worker:
            return replace(first, changes=self.batches.batch_changes)
        found = [(step, max(1, line.slots) * self.micro_batch_samples) for step, line in sorted(lines.items())]
        changes = [each for each, before in zip(found, [(0, 0), *found], strict=False) if each[1] != before[1]]
        return replace(first, changes=tuple(changes))


@dataclass(frozen=True)
class BatchRules:
    """How a run's batch changes, and the learning rate with it, as its events tell."""

    batch_changes: tuple[tuple[int, int], ...]  # (step, samples): from that step on
    slots_per_worker: int  # 0: the batch does not follow the workers
    lanes_max: int
    lr_rule: str
    lr_warmup_steps: int


@dataclass(frozen=True)
class Verdict:
    """The outcome of `verify`."""

    ok: bool
    run: str
    steps: int = 0
    samples: int = 0
    epochs_complete: int = 0  # of a single source, as is n_samples
    n_samples: int = 0
    sources: tuple[tuple[str, int, int], ...] = ()  # of a mixture: each source's name, samples and samples used
    lineage: int = 0
    superseded: int = 0
    members: int = 0
    handovers: int = 0  # joins and restores, in which the whole state was handed over
    unproven: int = 0  # those of them of which the ledger lacks one side's hash
    torn_line: bool = False
    skipped: int = 0  # steps whose update a policy has skipped
    scaled: int = 0  # steps whose update a policy has scaled
    left_out: int = 0  # slots whose samples were read, and count for nothing
    omitted: int = 0  # slots that the run omits: their samples were not read
    batches: str = ""  # where the batch changes, as `training.batch_schedule` has it; empty: nowhere
    damaged: tuple[str, ...] = ()
    finished: bool = False
    weights_sha256: str | None = None
    violations: tuple[str, ...] = field(default=())  # in the order of the steps
    origin: str | None = None  # RUN@VERSION that it began from
    before: Verdict | None = None  # on what that run had done by then; None if its folder is not here

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        damaged = []
        if self.damaged:
            damaged = [f"  {passed_over(self.damaged)}"]
        if not self.ok:
            more = len(self.violations) - 1
            lines = [f"NOT EXACT  {self.run}", f"  first violation: {self.violations[0]}"]
            if more:
                lines += [f"  and {more} more:"] + [f"    {text}" for text in self.violations[1:6]]
            return "\n".join(lines + damaged)
        lines = [
            f"EXACT  {self.run}",
            f"  {self.steps} steps, each with its full batch; {self.samples:,} samples, none twice, none missed",
        ]
        members = f"{self.members} members took part; lineage {self.lineage}"
        if self.sources:
            lines += [
                f"  {name}: {used:,} samples, {used / size:.2f} times its {size:,}" for name, size, used in self.sources
            ]
            lines.append(f"  {members}")
        else:
            lines.append(f"  {self.epochs_complete} whole epochs of {self.n_samples:,} samples; {members}")
        if self.skipped:
            lines.append(f"  {self.skipped} of them had an update that a policy has skipped; the ledger says why")
        if self.left_out:
            lines.append(f"  {self.left_out} slots of them were read and left out, with weight 0")
        if self.omitted:
            lines.append(f"  {self.omitted} slots of them were omitted, as the run's list of omissions says")
        if self.batches:
            lines.append(f"  the batch of each step, as training.batch_schedule has it: {self.batches}")
        if self.scaled:
            lines.append(f"  {self.scaled} of them had an update that a policy has scaled; the ledger says why")
        if self.superseded:
            lines.append(f"  {self.superseded} steps of older lineages were superseded by a restore and don't count")
        if self.handovers:
            proven = f"{self.handovers - self.unproven} of {self.handovers} joins and restores"
            lines.append(f"  {proven} took over the whole state as it was given, to the bit")
        if self.unproven:
            lines.append(
                f"  not proven: of {self.unproven} the ledger lacks a hash of the state, on one side or on both (an "
                "older version's run, or a folder that was not given)"
            )
        if self.weights_sha256:
            lines.append(f"  weights_sha256 {self.weights_sha256}")
        if not self.finished:
            lines.append("  the run has not finished; this covers what is committed so far")
        lines += damaged
        if self.before is not None:
            lines += [f"began from {self.origin}:", *(f"  {line}" for line in str(self.before).splitlines())]
        elif self.origin is not None:
            lines.append(f"  began from {self.origin}, whose folder is not at hand: what it did is not judged here")
        return "\n".join(lines)


def verify(*run_dirs: str | Path, max_violations: int = 20) -> Verdict:
    """Return the verdict on a run's folder, or on those of all its nodes together. One node's folder has what another
    did not see, and what several saw must be the same. If the run began from another, that one is judged too. Reads
    only. Raises a HarnessError only if there is nothing to judge."""
    folders = [Path(run_dir) for run_dir in run_dirs]
    ledger, events = _records(folders)
    verdict = judge(" ".join(map(str, folders)), ledger, *events, max_violations=max_violations)
    origin = next((found for folder in folders if folder.is_dir() and (found := origins.read(folder))), None)
    return verdict if origin is None else _with_origin(verdict, origin, max_violations)


def _with_origin(verdict: Verdict, origin: Origin, max_violations: int) -> Verdict:
    """Return the verdict, with a verdict on the run it began from, as far as that run had come by then."""
    folder = Path(origin.run)
    if not (folder / LEDGER).exists():
        return replace(verdict, origin=str(origin))
    ledger, events = _records([folder])
    entries = (entry for entry in ledger.entries if entry.lineage <= origin.lineage and entry.step < origin.version)
    until = replace(ledger, entries=tuple(entries))
    before = judge(str(folder), until, *events, max_violations=max_violations, until=origin.version)
    earlier = origins.read(folder)
    if earlier is not None:
        before = _with_origin(before, earlier, max_violations)
    violations = verdict.violations + tuple(f"in {folder}: {text}" for text in before.violations)
    return replace(
        verdict,
        ok=verdict.ok and before.ok,
        violations=violations,
        origin=str(origin),
        before=before if before.ok else None,
    )


def _records(folders: Sequence[Path]) -> tuple[Ledger, list[list[dict[str, Any]]]]:
    """Return the ledgers of a run's folders as one, and the events of each."""
    with_ledger = [folder for folder in folders if (folder / LEDGER).exists() or folder.is_file()]
    ledger = read_ledger(*(with_ledger or folders))
    damaged = list(ledger.damaged)
    events = [_events(folder / EVENTS, damaged.append) for folder in folders]
    return replace(ledger, damaged=tuple(damaged)), events


def _events(log: Path, damaged: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return the events that matter for the proof. A long run has millions of others."""
    if not log.exists():
        return []
    return [event for event in read_events(log, damaged) if event["event"] in _READ]


def judge(
    run: str, ledger: Ledger, *nodes: Iterable[Mapping[str, Any]], max_violations: int = 20, until: int | None = None
) -> Verdict:
    """Return the verdict on a ledger and the events beside it, of each node. Pure, apart from reading the ledger's
    lines. `until`: the steps before this one must be there, and later ones are not judged."""
    by_node = [list(events) for events in nodes]
    everywhere = [event for events in by_node for event in events]
    identity, violations = _identity(run, everywhere)
    violations += _told_twice(ledger)
    lines = ledger.followed()
    replay = _Replay(identity, lines, _omissions(everywhere), _worlds(everywhere))
    samples, skipped, scaled, members = 0, 0, 0, set[str]()
    for step, line in lines.items():
        if len(violations) >= max_violations:
            break
        found = replay.violations_of(line)
        violations += [f"step {step}: {text}" for text in found]
        samples += line.count
        skipped += bool(line.skipped)
        scaled += any(decision.get("verdict") == "scale" for decision in line.decisions) and not line.skipped
        members.update(member for member, _, _ in line.computed_by)
    if len(violations) < max_violations:
        violations += replay.gaps(until) + replay.incomplete_epochs()
    if until is not None:
        by_node = []
    handovers, unproven, changed = _handovers(ledger, everywhere)
    violations += changed
    ends = _newest_ends([end for events in by_node if (end := _finish(events)) is not None], lines)
    finished = ends[0] if ends else None
    if finished is not None and not violations:
        violations += _end_mismatch(finished, lines) + _different_ends(ends)
    return Verdict(
        ok=not violations,
        run=run,
        steps=len(lines),
        samples=samples,
        epochs_complete=replay.epochs_complete,
        n_samples=identity.n_samples,
        sources=replay.sources(),
        lineage=ledger.lineage,
        superseded=len({entry.key for entry in ledger.entries}) - len(lines),
        members=len(members),
        handovers=handovers,
        unproven=unproven,
        torn_line=ledger.torn,
        skipped=skipped,
        scaled=scaled,
        left_out=replay.left_out,
        omitted=replay.omitted,
        batches=replay.batches(),
        damaged=ledger.damaged,
        finished=finished is not None or until is not None,
        weights_sha256=None if finished is None else finished.get("weights_sha256"),
        violations=tuple(_in_step_order(violations)),
    )


class _Replay:
    """Recomputes, step by step, what the ledger must say, and counts the use of every sample."""

    def __init__(
        self,
        identity: RunIdentity,
        lines: Mapping[int, LedgerLine],
        omissions: Sequence[Omission] = (),
        worlds: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        """worlds: how many workers each generation had."""
        self.identity = identity
        self.omissions = omissions
        self.lines = lines
        self.schedule = identity.schedule(lines)
        self._worlds = worlds or {}
        rules, base = identity.batches, identity.global_batch_samples
        self.rate = None
        if rules is not None:
            self.rate = ScaledRate(ScalingRule(rules.lr_rule), self.schedule.batches, base, rules.lr_warmup_steps)
        self.epochs_complete = 0
        self.left_out = 0  # slots that were read and given no weight
        self.omitted = 0  # slots that were to be omitted, and were
        self._used: dict[tuple[int, int], np.ndarray] = {}  # of a source and its pass: which samples
        self._owner_of_hash: dict[str, tuple[int, int]] | None = None
        self._book_before(identity.first_position)

    def _book_before(self, position: int) -> None:
        """Count the samples of all positions before this one as used, by the run that this one began from."""
        order = self.identity.order
        for epoch in range(-(-position // self.identity.n_samples)):
            count = min(self.identity.n_samples, position - epoch * self.identity.n_samples)
            self._book(order.places(epoch, np.arange(count, dtype=np.int64)), slot=0)

    def violations_of(self, line: LedgerLine) -> list[str]:
        """Return everything that is wrong with one committed step, and book its samples as used."""
        identity = self.identity
        slots, lanes = self.shape_of(line.step)
        if line.slots != slots or line.lanes != lanes:
            return [f"recorded with {line.slots} slots in {line.lanes} lanes; the run has {slots} in {lanes}"]
        due = self.schedule.at(line.step)
        found = self._wrong_batch(line)
        if (line.epoch, line.position, line.count) != (due.epoch, due.position, due.count):
            found.append(
                f"consumed {line.count} samples from position {line.position} (epoch {line.epoch}); "
                f"the schedule says {due.count} from position {due.position} (epoch {due.epoch})"
            )
        coverage = [lanes_covered_once(computed_by, line.lanes) for computed_by in line.computed_by_shard]
        found += filter(None, coverage)
        if len(line.slot_samples) != line.slots or len(line.slot_weight) != line.slots:
            found.append(
                f"has {len(line.slot_samples)} sample hashes and {len(line.slot_weight)} weights for {line.slots} slots"
            )
            return found
        omitted = self.omitted_of(line)
        for slot, places in enumerate(self.slot_places(line.step)):
            ids = ids_of(identity.order, places)
            if line.slot_samples[slot] != ids_hash(ids):
                found.append(f"slot {slot} {self._misread(line.step, slot, line.slot_samples[slot], ids)}")
                continue
            if line.slot_weight[slot] > 0 and len(ids) == 0:
                found.append(f"slot {slot} has weight {line.slot_weight[slot]} but no samples")
            if slot in omitted.slots and line.slot_weight[slot] > 0:
                found.append(f"slot {slot} counts, although the run omits it ({omitted.reason})")
            self.omitted += slot in omitted.slots and len(ids) > 0
            self.left_out += slot not in omitted.slots and line.slot_weight[slot] == 0 and len(ids) > 0
            found += self._book(places, slot)
        return found

    def shape_of(self, step: int) -> tuple[int, int]:
        """Return how many slots and lanes a step has to have."""
        rules, slots = self.identity.batches, self.schedule.batch_at(step) // self.identity.micro_batch_samples
        return slots, self.identity.lanes if rules is None else min(slots, rules.lanes_max)

    def _wrong_batch(self, line: LedgerLine) -> list[str]:
        """Return what is wrong with the number of workers that a step is for, and with its learning rate."""
        rules = self.identity.batches
        if rules is None or self.rate is None:
            return [] if line.lr_scale == 1 else [f"has its rate multiplied by {line.lr_scale!r}, without a rule"]
        found = []
        due = self.rate.factor(line.step)
        if line.lr_scale != due:
            found.append(f"has its learning rate multiplied by {line.lr_scale!r}; its batch gives {due!r}")
        if rules.slots_per_worker:
            workers, odd = divmod(line.slots, rules.slots_per_worker)
            before = self.lines.get(line.step - 1)
            since = min(self._worlds, default=0) if before is None else before.generation
            since = min(since, line.generation)  # without a launcher each start is generation 1
            worlds = [self._worlds.get(number, ()) for number in range(since, line.generation + 1)]
            known = sorted({world for each in worlds for world in each})
            if odd or (all(worlds) and workers not in known):
                named = " or ".join(map(str, known))
                found.append(
                    f"has {line.slots} slots, {rules.slots_per_worker} for each worker; there were {named} workers"
                )
        return found

    def omitted_of(self, line: LedgerLine) -> Omitted:
        """Return what the step had to omit, as far as the run had decided that by its lineage."""
        known = [each for each in self.omissions if each.lineage <= line.lineage]
        return omitted(known, line.step, line.slots)

    def slot_places(self, step: int) -> list[SamplePlaces]:
        """Return the samples that every slot of a step has to read, by arithmetic alone."""
        identity, due = self.identity, self.schedule.at(step)
        ranges = [due.slot_range(slot, identity.micro_batch_samples) for slot in range(self.shape_of(step)[0])]
        positions = np.arange(due.first, due.first + due.count, dtype=np.int64)
        step_places = identity.order.places(due.epoch, positions)  # for all at once: it costs as much for one position
        offsets = [(low - due.first, high - due.first) for low, high in ranges]
        return [SamplePlaces(*(column[low:high] for column in step_places)) for low, high in offsets]

    def gaps(self, until: int | None = None) -> list[str]:
        """Return the steps between the first and the last one (or `until`) that no line covers."""
        first, end = self.identity.first_step, until if until is not None else max(self.lines, default=-1) + 1
        missing = sorted(set(range(first, end)) - set(self.lines))
        if not self.lines:
            return [f"step {first}: and all up to {end - 1} are missing from the ledger"] if missing else []
        if not missing:
            return []
        start = min(self.lines)
        if missing == list(range(start)) and self.lines[start].from_step == start:
            return [
                f"step 0: is missing from the ledger: this folder began at step {start}, with a checkpoint from "
                "elsewhere; the steps before are in the ledger of the folder where they were computed"
            ]
        there = f"step {end - 1}" if until is None else f"a checkpoint of version {until}"
        return [
            f"step {missing[0]}: is missing from the ledger, though {there} is there"
            + (f" ({len(missing)} steps are missing in all)" if len(missing) > 1 else "")
        ]

    def incomplete_epochs(self) -> list[str]:
        """Return the passes through a source that are over but left a sample out. For a single source these are
        epochs."""
        found = []
        last = max(self.lines, default=-1)
        if last < 0:
            return []
        newest, order = self.schedule.at(last), self.identity.order
        for source, drawn in enumerate(order.drawn(newest.epoch, newest.first + newest.count)):
            size = order.sizes[source]
            for turn in range(drawn // size):
                used = self._used.get((source, turn))
                count = 0 if used is None else int(used.sum())
                if count == size:
                    self.epochs_complete += 1
                    continue
                sample = 0 if used is None else int(np.flatnonzero(~used)[0])
                where = last if order.names else self.schedule.last_step_of(turn)
                found.append(
                    f"step {where}: ends {self._pass(source, turn)}, in which {size - count} samples were never used, "
                    f"sample {sample} among them"
                )
        return found

    def batches(self) -> str:
        """Return the batches of a run in which they change. A run with this schedule comes to the same bits."""
        if self.identity.batches is None:
            return ""
        return listed(each for each in self.schedule.batches if each[0] <= max(self.lines, default=-1))

    def sources(self) -> tuple[tuple[str, int, int], ...]:
        """Return name, number of samples, and how many were used, for each source of a mixture."""
        order, used = self.identity.order, Counter[int]()
        for (source, _), samples in self._used.items():
            used[source] += int(samples.sum())
        return tuple((name, order.sizes[source], used[source]) for source, name in enumerate(order.names))

    def _pass(self, source: int, turn: int) -> str:
        names = self.identity.order.names
        return f"pass {turn} through {names[source]}" if names else f"epoch {turn}"

    def _book(self, places: SamplePlaces, slot: int) -> list[str]:
        order, found = self.identity.order, []
        for source, turn in dict.fromkeys(zip(places.sources.tolist(), places.passes.tolist(), strict=True)):
            ids = places.numbers[(places.sources == source) & (places.passes == turn)]
            used = self._used.setdefault((source, turn), np.zeros(order.sizes[source], dtype=bool))
            again = ids[used[ids]]
            if len(np.unique(ids)) != len(ids) or len(again):
                sample = int(again[0]) if len(again) else int(ids[0])
                found.append(f"slot {slot} uses sample {sample} a second time in {self._pass(source, turn)}")
            used[ids] = True
        return found

    def _misread(self, step: int, slot: int, found: str, ids: np.ndarray) -> str:
        """Return the meaning of a wrong hash, as far as the ledger tells: whose samples were read instead."""
        if self._owner_of_hash is None:
            self._owner_of_hash = {
                ids_hash(ids_of(self.identity.order, places)): (other, slot)
                for other in self.lines
                for slot, places in enumerate(self.slot_places(other))
            }
        due = f"samples {_some(ids)} were due there and were not read"
        owner = self._owner_of_hash.get(found)
        if owner is None:
            return f"read samples of no slot of this run (hash {found}, due {ids_hash(ids)}); {due}"
        return f"read the samples of step {owner[0]} slot {owner[1]}, which are used twice so; {due}"


def _some(ids: np.ndarray) -> str:
    shown = ", ".join(str(int(sample)) for sample in ids[:4])
    return f"[{shown}{', …' if len(ids) > 4 else ''}]"


def _identity(run: str, events: list[Mapping[str, Any]]) -> tuple[RunIdentity, list[str]]:
    configured = [event for event in events if event.get("event") == "run_configured"]
    if not configured:
        raise ConfigError(
            f"{run}: events.jsonl has no run_configured event, so nothing says how many samples there are; "
            "verify a run whose workers have started training"
        )
    identities = []
    for event in configured:
        missing = [name for name in _IDENTITY if name not in event]
        if missing:
            raise ConfigError(f"{run}: the run_configured event lacks {missing[0]!r}; it has {sorted(event)}")
        numbers = {name: int(event[name]) for name in _IDENTITY} | {n: int(event.get(n, 0)) for n in _BEGINNING}
        order, rules = _order(numbers, event.get("order")), None
        if "batch_changes" in event:
            try:
                rules = build(BatchRules, {field.name: event.get(field.name) for field in fields(BatchRules)})
            except ValueError as error:
                raise ConfigError(f"{run}: the run_configured event is damaged: {error}") from None
        identities.append(RunIdentity(**numbers, order=order, batches=rules))
    changed = [
        f"{name} was {getattr(identities[0], name)} when the run began and {getattr(later, name)} when it resumed"
        for later in identities[1:]
        for name in (*_IDENTITY, *_BEGINNING, "batches")
        if getattr(later, name) != getattr(identities[0], name)
    ]
    data_sets = {json.dumps([event.get("dataset"), event.get("order")], sort_keys=True) for event in configured}
    if not changed and len(data_sets) > 1:
        changed = ["the data set changed between two starts of the run: " + " and ".join(sorted(data_sets))]
    return identities[0], changed[:1]


def _omissions(events: Iterable[Mapping[str, Any]]) -> tuple[Omission, ...]:
    """Return what the run omits, as it has told with its lineages."""
    configured = (event for event in events if event.get("event") == "run_configured")
    return as_omissions(each for event in configured for each in event.get("omissions", ()))


def _worlds(events: Iterable[Mapping[str, Any]]) -> dict[int, set[int]]:
    """Return how many workers each generation had. Without a launcher each start of the run is generation 1."""
    worlds: dict[int, set[int]] = {}
    for event in events:
        if event.get("event") == "generation" and "number" in event and "members" in event:
            worlds.setdefault(event["number"], set()).add(len(event["members"]))
    return worlds


def _order(numbers: Mapping[str, int], description: Mapping[str, Any] | None) -> Order:
    """Return the order that a run describes; without a description, epochs shuffled by the run's seed."""
    return EpochOrder(numbers["n_samples"], numbers["seed"]) if description is None else order_of(description)


def _newest_ends(ends: list[Mapping[str, Any]], lines: Mapping[int, LedgerLine]) -> list[Mapping[str, Any]]:
    """Return the end events of the nodes that saw the end. A node may have been away while the others trained on."""
    if len(ends) < 2:
        return ends
    newest = max(int(end["version"]) for end in ends)
    return [end for end in ends if int(end["version"]) == newest] if max(lines, default=-1) < newest else []


def _told_twice(ledger: Ledger) -> list[str]:
    """Return what is wrong if a ledger has a step of a lineage twice. Ledgers of several nodes may have the same step,
    with the same outcome. A node may have told of a step whose data did not reach the others before it was lost. Then
    the others have computed it again, in another generation."""
    seen: dict[tuple[int, int], LedgerEntry] = {}
    for entry in ledger.entries:
        first = seen.setdefault(entry.key, entry)
        if first is entry:
            continue
        lines = [ledger.line(first), ledger.line(entry)]
        several = first.file != entry.file
        if several:
            lines = [replace(line, generation=0, world_size=0, computed_by=(), replicas=()) for line in lines]
        one, other = (json.dumps(line.to_json()) for line in lines)
        if not several or one != other:
            how = "" if one == other else ", with different content"
            return [f"step {entry.step}: is recorded twice in lineage {entry.lineage}{how}"]
    return []


def _handovers(ledger: Ledger, events: Iterable[Mapping[str, Any]]) -> tuple[int, int, list[str]]:
    """Return how often a member took over the whole state, for how many of these one side's hash is missing, and where
    the two sides differ. Hand-overs that a later lineage has superseded do not count. A version that wrote no such
    lines is known from its events."""
    begins = {entry.lineage: entry.from_step for entry in ledger.entries}

    def counts(lineage: int, version: int) -> bool:
        return all(later <= lineage or begin >= version for later, begin in begins.items())

    given: dict[tuple[int, int, int, str | None], set[str]] = {}
    for line in ledger.states:
        if line.taken_from is None:
            given.setdefault((line.lineage, line.version, line.generation, line.holder), set()).add(line.state)
    taken = [line for line in dict.fromkeys(ledger.states) if line.taken_from and counts(line.lineage, line.version)]
    without, changed = 0, []
    for line in taken:
        sent = given.get((line.lineage, line.version, line.generation, line.taken_from))
        if sent is None:
            without += 1
        elif sent != {line.state}:
            changed.append(
                f"step {line.version}: {line.holder} took over the state from {line.taken_from}, and what it held "
                f"then is not what it was given (hash {line.state}, given {', '.join(sorted(sent))})"
            )
    known = {(line.generation, line.holder, line.version) for line in ledger.states}
    untold = {
        (event["generation"], event["member"], event["version"])
        for event in events
        if event.get("event") == "worker_joined" and event.get("source") in ("state", "restore")
        if counts(event.get("lineage", ledger.lineage), event["version"])
    } - known
    return len(taken) + len(untold), without + len(untold), changed


def _finish(events: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the `run_finished` event if the run reached its end and did nothing after it."""
    for event in reversed(events):
        if event.get("event") == "run_started":
            return None
        if event.get("event") == "run_finished":
            return event if event.get("version") is not None else None
    return None


def _end_mismatch(finished: Mapping[str, Any], lines: Mapping[int, LedgerLine]) -> list[str]:
    version, last = int(finished["version"]), max(lines, default=-1)
    if last == version - 1:
        return []
    return [
        f"step {last}: is the last one in the ledger, but the run finished at version {version} (step {version - 1})"
    ]


def _different_ends(ends: Sequence[Mapping[str, Any]]) -> list[str]:
    hashes = sorted({str(end.get("weights_sha256")) for end in ends})
    return [] if len(hashes) == 1 else [f"the nodes finished with different weights: {', '.join(hashes)}"]


def _in_step_order(violations: list[str]) -> list[str]:
    def order(text: str) -> int:
        head = text.split(":", 1)[0].split()
        return int(head[1]) if len(head) == 2 and head[0] == "step" and head[1].isdigit() else -1

    return sorted(violations, key=order)


def main(argv: list[str] | None = None) -> int:
    """Run `elastic-harness verify RUN`: print the verdict, and return 0 if the ledger is exact, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness verify", description="Prove that a run used every sample exactly once."
    )
    parser.add_argument(
        "run", nargs="+", metavar="RUN", help="a run's folder, or its id below runs/; of several nodes all folders"
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    arguments = parser.parse_args(argv)
    hint = ""
    try:
        folders = [path for run in arguments.run for path in of_run(run, LEDGER, EVENTS)]
        if len(folders) == 1 and "@" in folders[0].resolve().name:
            hint = "\n  this is the folder of one node: give those of all nodes of the run"
        verdict = verify(*folders)
    except HarnessError as error:
        if arguments.json:
            print(json.dumps({"ok": False, "run": " ".join(arguments.run), "violations": [str(error)]}))
        else:
            print(f"elastic-harness verify: {error}{hint}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(verdict.to_json()) if arguments.json else f"{verdict}{'' if verdict.ok else hint}")
    return EXIT_SUCCESS if verdict.ok else EXIT_VIOLATED
