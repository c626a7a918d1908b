"""What is measured of a version, beside training: its validation, and what the script reports. All members know it
before they begin the next step, and the checkpoint of that version has it.

    tell each other what is known of this version → share out the batches that nobody has measured → tell the rest

Nothing of it outlives a failure but values, and a value is the same whoever computes it. So in each generation the
members begin anew with what they have. Members that still receive the state are left out: they get the validation's
value with the step's headers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_harness.contract.board import Phase
from elastic_harness.contract.messages import LogEvent, MeasuresDiffer
from elastic_harness.errors import UserCodeError
from elastic_harness.failpoints import failpoint
from elastic_harness.train.compute import stop_if_void
from elastic_harness.train.engine import Engine
from elastic_harness.train.gate import GateVerdict, odd
from elastic_harness.train.header import Header
from elastic_harness.train.measures import Measured
from elastic_harness.train.progress import Formed, Progress
from elastic_harness.train.validation import Validation, Value, evaluating, exact_mean
from elastic_harness.train.words import gather_texts


def knows_measures(progress: Progress) -> bool:
    """Whether this member takes part in measuring its version: it does not receive the state beside the others."""
    formed = progress.formed
    assert formed is not None
    return formed.rank not in formed.late(progress.version)


def measure(engine: Engine, progress: Progress, *, last: bool = False) -> None:
    """Have all members know what is measured of their version, if anything is. Collective; blocks as long as the
    slowest member's share of the batches takes, and raises as an exchange does. Before a step every member calls it in
    each generation in which it is at this version. `last`: no step follows, so nobody is left out."""
    formed, version, known = progress.formed, progress.version, progress.measured
    assert formed is not None
    number, measures = formed.generation.number, engine.measures
    begins = formed.begins(version)
    if engine.replay is not None or known.agreed_in == number or not (begins or measures.is_due(version)):
        return
    late = () if last else formed.late(version)
    if formed.rank in late:
        return
    among, began_at = [rank for rank in range(formed.world) if rank not in late], time.monotonic()
    failpoint("measured.told", version)
    told = _tell(engine, progress, among, 0, known.values, known.reports, measures.in_words if begins else "")
    reports = {rank: text.get("reports", {}) for rank, text in told.items()}
    if differs := _differing(told, formed) or _contradicting(reports, formed, version):
        engine.link.send(MeasuresDiffer(differs))
        raise UserCodeError(differs)
    for each in reports.values():
        known.reports.update(each)
    _merge_values(known, told.values())
    validation = measures.validation if measures.validates(version) else None
    if validation is not None:
        missing = [index for index in range(validation.count) if index not in known.values]
        if missing:
            unproven = formed.unverified(version)
            able = [rank for rank in among if rank not in unproven] or among  # a machine that computes wrong has no say
            share = missing[able.index(formed.rank) :: len(able)] if formed.rank in able else []
            _compute(engine, progress, validation, share)
            failpoint("validation.computed", version)
            mine = {index: known.values[index] for index in share}
            _merge_values(known, _tell(engine, progress, among, 2, mine).values())
        known.validation = exact_mean({index: known.values[index] for index in range(validation.count)})
    failpoint("measured.known", version)
    known.agreed_in = number
    metrics = known.metrics(measures)
    if metrics and formed.speaks and not known.told:
        known.told = True
        took_s = round(time.monotonic() - began_at, 3)
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        fields = {"step": version, "metrics": values, "workers": len(among), "took_s": took_s}
        engine.link.send(LogEvent("validation", fields))


def _compute(engine: Engine, progress: Progress, validation: Validation, share: Sequence[int]) -> None:
    """Measure these batches. What was measured stays, also if this is interrupted by a change of generation."""
    version = progress.version
    with evaluating(engine.registry.model):
        for index in share:
            stop_if_void(engine, progress)
            with engine.deadlines.measured(Phase.VALIDATION, version, index):
                failpoint("validation.batch", version)
                progress.measured.values[index] = validation.value_of(index, version, engine.config.seed)
            engine.watch.check_slot(f"in measure(), in the validation of version {version}")


def _tell(
    engine: Engine,
    progress: Progress,
    among: Sequence[int],
    turn: int,
    values: Mapping[int, Value],
    reports: Mapping[str, float] | None = None,
    measures: str = "",
) -> dict[int, dict[str, Any]]:
    """Return what each of these ranks tells. Collective among them."""
    mine = {"values": [[index, *value] for index, value in values.items()], "reports": reports, "measures": measures}
    mine = {name: part for name, part in mine.items() if part}
    told = gather_texts(engine, progress, json.dumps(mine) if mine else "", among, turn)
    return {rank: json.loads(text) if text else {} for rank, text in zip(among, told, strict=True)}


def _merge_values(known: Measured, told: Iterable[Mapping[str, Any]]) -> None:
    for text in told:
        known.values.update({index: (value, weight) for index, value, weight in text.get("values", ())})


def _contradicting(told: Mapping[int, Mapping[str, float]], formed: Formed, version: int) -> str:
    """Return who has reported another value than another member, in words. Empty: nobody."""
    first: dict[str, int] = {}
    for rank, reports in told.items():
        for name, value in reports.items():
            other = first.setdefault(name, rank)
            if told[other][name] != value:
                members = formed.generation.members
                return (
                    f"run.report() was given two values of {name} for the weights after {version} steps: "
                    f"{told[other][name]!r} by worker {members[other]} (rank {other}), {value!r} by worker "
                    f"{members[rank]} (rank {rank}). Let one worker report, or all the same value; "
                    "start(validation=…) shares a validation out and has one value for all"
                )
    return ""


def _differing(told: Mapping[int, Mapping[str, Any]], formed: Formed) -> str:
    """Return who measures other things than another member, in words. Empty: nobody."""
    measures = {rank: text["measures"] for rank, text in told.items() if "measures" in text}
    first = next(iter(measures), 0)
    for rank, text in measures.items():
        if text != measures[first]:
            members = formed.generation.members
            return (
                f"workers measure different things: {members[first]} has {measures[first]}, and {members[rank]} has "
                f"{text}. Give all of them the same validation= and the same checkpoint.best_metric"
            )
    return ""


def same_measures(headers: Sequence[Header], reference: int | None) -> tuple[GateVerdict, str] | None:
    """Decide over what members measure, as `gate` does over their canaries; None: it is the same. Whoever joins is
    compared here, before a version comes at which it would wait for the others, or they for it."""
    unfit, _ = odd([header.measures for header in headers], reference)
    if not unfit:
        return None
    reason = f"ranks {unfit} measure other things than the others: their validation= or checkpoint.best_metric differs"
    return GateVerdict(False, unfit, 0, False), reason
