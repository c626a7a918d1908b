"""Concludes from the reports of all members where each one's state comes from: the digest. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic_harness.errors import Inconsistent
from elastic_harness.membership.types import Digest, Generation, LaneRanges, Replica, Report, Source, SourceKind

Doubts = Sequence[tuple[int, int]]
"""A lineage, and the version at which it began: what lineages before it did beyond that version never counts."""
CHECKPOINTS_TOLD = 4  # on the run's history; a few more may be told besides


def reconcile(
    generation: Generation,
    reports: Mapping[str, Report],
    *,
    born: bool,
    lineage: int,
    from_step: int,
    doubts: Doubts = (),
) -> tuple[Digest, str]:
    """Return the digest for a generation whose members have all reported, and the reason in words.

    State at version v is a pure function of (seed, v) and of the batches so far, so the members can differ only in how
    far they are. The run goes on from the version of the farthest member. A member that is one step behind replays that
    step's record, if a donor has it. All other members that are behind take the whole state. State of an older lineage
    does not count, because the run and its ledger have gone on from an earlier step without it.

    If nobody has state, the members restore the newest checkpoint on the run's history, and open a new lineage. A run
    that was ever born, but has no checkpoint, begins again at step 0 in a new lineage, and says so. Rank 0 initialises
    a new run.

    With several shards each column does so for itself, and all of them reach the version of the farthest member. A
    whole column may be one step behind. A member applies a step only when it has the seals of all. So each member that
    is behind has sealed the step, holds its record, and goes forward by itself. A column in which no member can reach
    the version has lost its shard. Then nobody has state, and each column restores the same checkpoint.
    """
    members = generation.members
    if set(reports) != set(members):
        raise Inconsistent(f"there are reports of {sorted(reports)}, but the generation's members are {list(members)}")
    shard_of = generation.shard_of
    born = born or any(report.version > 0 for report in reports.values())  # the leader may not have heard of a commit
    reports = {m: _as_far_as_counts(report, lineage, shard_of[m]) for m, report in reports.items()}
    version = max(reports[m].version for m in members)
    if version < 0 or not all(any(_reaches(reports[m], version) for m in column) for column in generation.columns):
        return _from_nothing(generation, reports, born=born, lineage=lineage, from_step=from_step, doubts=doubts)

    ahead = [m for m in members if reports[m].version == version]
    workers = _begun_for([reports[m] for m in ahead])
    same = {m for m in ahead if reports[m].begun_for[1] == workers}
    by_column = [_sources(column, reports, version, ahead[0]) for column in generation.columns]
    found = {member: source for sources in by_column for member, source in sources.items()}
    sources = {member: found[member] for member in members}
    digest = Digest(
        generation=generation.number,
        version=version,
        lineage=lineage,
        from_step=from_step,
        sources=sources,
        lanes=_finished(generation.rows, same, reports),
        unverified=tuple(m for m in members if not reports[m].verified),
        workers=workers,
        declined=tuple(
            (m, tuple(sorted(lane for lane, _ in reports[m].declined)))
            for m in ahead
            if m in same and reports[m].declined
        ),
    )
    forward = sum(s.kind == "forward" for s in sources.values())
    replayed = sum(s.kind == "replay" for s in sources.values())
    received = sum(s.kind == "state" for s in sources.values())
    went = f"{forward} go forward, " if forward else ""
    return digest, f"resume at version {version}: {len(ahead)} keep, {went}{replayed} replay, {received} take the state"


def declined_by_all(generation: Generation, reports: Mapping[str, Report], version: int) -> int | None:
    """Return a slot of the step `version` for which no row of members has the memory; None if there is none."""
    declined = [
        {slot for m in row for _, slot in reports[m].declined if reports[m].version == version}
        for row in generation.rows
    ]
    return min(set.intersection(*declined), default=None) if declined else None


def scattered(generation: Generation, reports: Mapping[str, Report], lineage: int) -> bool:
    """Return whether members hold all shards, but one of them holds another than the generation gave it. Then the
    leader did not know which member holds which shard, and would give state up."""
    held = {m: r.shard for m, r in reports.items() if _as_far_as_counts(r, lineage, r.shard).version >= 0}
    every = len(set(held.values())) == len(generation.columns)
    return every and any(generation.shard_of[member] != shard for member, shard in held.items())


def _as_far_as_counts(report: Report, lineage: int, shard: int) -> Report:
    """Return the report as it counts: without its state, if that is of an older lineage or of another shard."""
    if report.version < 0 or (not 0 <= report.lineage < lineage and report.shard == shard):
        return report
    return replace(report, version=-1, record=None, lanes=(), sealed=False)


def _reaches(report: Report, version: int) -> bool:
    """Return whether a member is at the version, or can reach it by itself."""
    return report.version == version or (report.sealed and report.version == version - 1)


def _sources(column: tuple[str, ...], reports: Mapping[str, Report], version: int, ahead: str) -> dict[str, Source]:
    """Return where each member of a column has its state from. `ahead`: a member of any column at the version."""
    holders = [m for m in column if reports[m].version == version] or [
        m
        for m in column
        if _reaches(reports[m], version)  # these members serve others after they have gone forward
    ]
    loads = dict.fromkeys(holders, 0)
    donors = [(0, rank) for rank, m in enumerate(column) if m in loads]
    recorders = [
        (load, rank)
        for load, rank in donors
        if reports[column[rank]].version == version and reports[column[rank]].record == version - 1
    ]
    sources: dict[str, Source] = {}

    def spread(candidates: list[tuple[int, int]]) -> str:
        """Return the least loaded candidate, of several the earliest rank, so that donors share the work. `candidates`
        is a heap of loads and ranks. A load is brought up to date when it comes first in the heap."""
        while candidates[0][0] != loads[column[candidates[0][1]]]:
            rank = candidates[0][1]
            heapq.heapreplace(candidates, (loads[column[rank]], rank))
        donor = column[candidates[0][1]]
        loads[donor] += 1
        return donor

    for member in column:
        own = reports[member].version
        if own == version:
            sources[member] = Source("keep")
        elif _reaches(reports[member], version):
            sources[member] = Source("forward", ahead)
        elif own == version - 1 and own >= 0 and recorders:
            sources[member] = Source("replay", spread(recorders))
        else:
            sources[member] = Source("state", spread(donors))
    return sources


def _begun_for(reports: Sequence[Report]) -> int:
    """Return for how many replicas the running step goes on: as it was begun last. 0: nobody has begun it, or it does
    not matter.

    A step that somebody has committed was begun by all members of that generation, because it takes the headers of all.
    Whoever of them is here says so, and so does every later generation that one of them was in. Lanes that were
    finished for another number start over."""
    return max((report.begun_for for report in reports), default=(0, 0))[1]


def _finished(rows: tuple[Replica, ...], ahead: set[str], reports: Mapping[str, Report]) -> dict[str, LaneRanges]:
    """Return each member's finished lanes of the running step: those that all members of its row hold. A row whose
    lanes overlap with an earlier row's starts over, because its partial sums may already contain the duplicate."""
    taken: set[int] = set()
    kept: dict[str, LaneRanges] = {}
    for row in rows:
        if not ahead.issuperset(row):
            continue
        held = [{lane for lo, hi in reports[m].lanes for lane in range(lo, hi)} for m in row]
        lanes = set.intersection(*held)
        if lanes and not lanes & taken:
            taken |= lanes
            for member, own in zip(row, held, strict=True):
                kept[member] = reports[member].lanes if own == lanes else tuple((x, x + 1) for x in sorted(lanes))
    return kept


def worth_telling(report: Report, lineage: int, from_step: int, doubts: Doubts = ()) -> Report:
    """Return the report with so few checkpoints that the reports of all members fit into one request to a store.

    The newest ones on the run's history, as this node knows it, are kept: the leader restores one of them. The history
    that the leader knows may branch off earlier. For that case some of all are kept, fewer the older they are, with the
    oldest, and the newest one of the newest lineage.
    """
    lineages = report.lineages or (lineage,) * len(report.checkpoints)
    every = list(zip(report.checkpoints, lineages, strict=True))
    if len(every) <= CHECKPOINTS_TOLD:
        return report
    on_history = [each for each in every if _is_on_history(*each, lineage, from_step, doubts)]
    sparse = [every[(1 << exponent) - 1] for exponent in range(len(every).bit_length())]
    newest = next(each for each in every if each[1] == max(lineages))
    told = {*on_history[:CHECKPOINTS_TOLD], *sparse, newest, every[-1]}
    versions, lineages = zip(*(each for each in every if each in told), strict=True)
    return replace(report, checkpoints=versions, lineages=lineages)


def _is_on_history(version: int, of: int, lineage: int, from_step: int, doubts: Doubts) -> bool:
    """Return whether a checkpoint lies on the run's history. One of an older lineage does so only up to the step at
    which the newest lineage began. Those of lineages between that were given up have the same bits, unless they are in
    doubt."""
    if any(of < begun and version > certain for begun, certain in doubts):
        return False
    return of >= lineage or version <= from_step


def _offers(report: Report, lineage: int, from_step: int, doubts: Doubts) -> set[int]:
    """Return the checkpoints that lie on the run's history."""
    lineages = report.lineages or (lineage,) * len(report.checkpoints)
    offered = zip(report.checkpoints, lineages, strict=True)
    return {version for version, of in offered if _is_on_history(version, of, lineage, from_step, doubts)}


def _from_nothing(
    generation: Generation,
    reports: Mapping[str, Report],
    *,
    born: bool,
    lineage: int,
    from_step: int,
    doubts: Doubts,
) -> tuple[Digest, str]:
    """Return the digest of a generation in which nobody has state: restore a checkpoint, or begin at step 0."""
    members = generation.members
    kind: SourceKind
    offers = {m: _offers(reports[m], lineage, from_step, doubts) for m in members}
    common = set.intersection(*(set[int]().union(*(offers[m] for m in column)) for column in generation.columns))
    if common:
        version = max(common)
        first = [next(m for m in column if version in offers[m]) for column in generation.columns]
        kind, reason = "restore", f"nobody has state: restore the checkpoint of version {version}"
    else:
        version, first, kind = 0, [column[0] for column in generation.columns], "init"
        reason = "nobody has state and no checkpoint exists: begin again at step 0" if born else "a new run"
    if born or version:  # a run that is not known to be born may find a checkpoint all the same
        lineage, from_step = lineage + 1, version
    sources = {m: Source("state", first[shard]) for m, shard in generation.shard_of.items()}
    sources |= dict.fromkeys(first, Source(kind))
    digest = Digest(
        generation=generation.number,
        version=version,
        lineage=lineage,
        from_step=from_step,
        sources=sources,
        unverified=tuple(m for m in members if not reports[m].verified),
    )
    return digest, reason
