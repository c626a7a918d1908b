"""Who applied what: from the reports of all members to one digest. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace

from elastic_harness.errors import Inconsistent
from elastic_harness.membership.types import Digest, Generation, LaneRanges, Report, Source, SourceKind

CHECKPOINTS_TOLD = 4


def reconcile(
    generation: Generation, reports: Mapping[str, Report], *, born: bool, lineage: int, from_step: int
) -> tuple[Digest, str]:
    """The digest for a generation whose members have all reported, and the reason in words.

    State at version v is a pure function of (seed, v), so the members can differ only in how far they are. The
    farthest one wins; whoever is one step behind replays that step's record, everyone else behind takes the state.
    State of an older lineage does not count: the run has gone on from an earlier step without it, and its ledger too.
    If nobody has state, a run that was ever born restores its newest checkpoint (or, loudly, begins again at zero)
    and opens a new lineage; a new run is initialised by rank 0.
    """
    members = generation.members
    if set(reports) != set(members):
        raise Inconsistent(f"there are reports of {sorted(reports)}, but the generation's members are {list(members)}")
    reports = {m: _as_far_as_counts(report, lineage) for m, report in reports.items()}
    version = max(reports[m].version for m in members)
    if version < 0:
        return _from_nothing(generation, reports, born=born, lineage=lineage, from_step=from_step)

    ahead = [m for m in members if reports[m].version == version]
    loads = dict.fromkeys(ahead, 0)
    donors = [(0, rank) for rank, m in enumerate(members) if m in loads]
    recorders = [(load, rank) for load, rank in donors if reports[members[rank]].record == version - 1]
    sources: dict[str, Source] = {}

    def spread(candidates: list[tuple[int, int]]) -> str:
        """The least loaded candidate, the earliest rank first: donors share the work. `candidates` is a heap of loads
        and ranks; its loads are brought up to date where it matters."""
        while candidates[0][0] != loads[members[candidates[0][1]]]:
            rank = candidates[0][1]
            heapq.heapreplace(candidates, (loads[members[rank]], rank))
        donor = members[candidates[0][1]]
        loads[donor] += 1
        return donor

    for member in members:
        own = reports[member].version
        if own == version:
            sources[member] = Source("keep")
        elif own == version - 1 and own >= 0 and recorders:
            sources[member] = Source("replay", spread(recorders))
        else:
            sources[member] = Source("state", spread(donors))
    digest = Digest(
        generation=generation.number,
        version=version,
        lineage=lineage,
        from_step=from_step,
        sources=sources,
        lanes=_finished(ahead, reports),
        unverified=tuple(m for m in members if not reports[m].verified),
    )
    replayed = sum(s.kind == "replay" for s in sources.values())
    received = sum(s.kind == "state" for s in sources.values())
    return digest, f"resume at version {version}: {len(ahead)} keep, {replayed} replay, {received} take the state"


def _as_far_as_counts(report: Report, lineage: int) -> Report:
    if report.version < 0 or not 0 <= report.lineage < lineage:
        return report
    return replace(report, version=-1, record=None, lanes=())


def _finished(ahead: list[str], reports: Mapping[str, Report]) -> dict[str, LaneRanges]:
    """Finished lanes of the running step. A member whose lanes overlap an earlier holder's starts over: its
    partial sums may already contain the duplicate."""
    taken: set[int] = set()
    kept: dict[str, LaneRanges] = {}
    for member in ahead:
        lanes = {lane for lo, hi in reports[member].lanes for lane in range(lo, hi)}
        if lanes and not lanes & taken:
            taken |= lanes
            kept[member] = reports[member].lanes
    return kept


def worth_telling(report: Report, lineage: int, from_step: int) -> Report:
    """The same report with so few checkpoints that the reports of all members fit into one request to a store: of those
    on the run's history, as it is known here, the newest, for the leader restores one of them. In case its history
    branched off earlier, some of all, ever fewer the older they are, and the newest one of the newest lineage."""
    lineages = report.lineages or (lineage,) * len(report.checkpoints)
    every = list(zip(report.checkpoints, lineages, strict=True))
    if len(every) <= CHECKPOINTS_TOLD:
        return report
    on_history = [each for each in every if _is_on_history(*each, lineage, from_step)]
    sparse = [every[(1 << exponent) - 1] for exponent in range(len(every).bit_length())]
    newest = next(each for each in every if each[1] == max(lineages))
    told = {*on_history[:CHECKPOINTS_TOLD], *sparse, newest, every[-1]}
    versions, lineages = zip(*(each for each in every if each in told), strict=True)
    return replace(report, checkpoints=versions, lineages=lineages)


def _is_on_history(version: int, of: int, lineage: int, from_step: int) -> bool:
    """Whether a checkpoint lies on the run's history: of an older lineage only what the newest one began with does."""
    return of >= lineage or version <= from_step


def _offer(report: Report, lineage: int, from_step: int) -> int | None:
    """The newest checkpoint that lies on the run's history."""
    lineages = report.lineages or (lineage,) * len(report.checkpoints)
    offered = zip(report.checkpoints, lineages, strict=True)
    return next((version for version, of in offered if _is_on_history(version, of, lineage, from_step)), None)


def _from_nothing(
    generation: Generation, reports: Mapping[str, Report], *, born: bool, lineage: int, from_step: int
) -> tuple[Digest, str]:
    members = generation.members
    kind: SourceKind
    offers = {m: offer for m in members if (offer := _offer(reports[m], lineage, from_step)) is not None}
    if offers:
        version = max(offers.values())
        source_member = next(m for m in members if offers.get(m) == version)
        kind, reason = "restore", f"nobody has state: restore the checkpoint of version {version}"
    else:
        version, source_member, kind = 0, members[0], "init"
        reason = "nobody has state and no checkpoint exists: begin again at step 0" if born else "a new run"
    if born or version:  # a run that is not known to be born may find a checkpoint all the same
        lineage, from_step = lineage + 1, version
    sources = {m: Source("state", source_member) for m in members}
    sources[source_member] = Source(kind)
    digest = Digest(
        generation=generation.number,
        version=version,
        lineage=lineage,
        from_step=from_step,
        sources=sources,
        unverified=tuple(m for m in members if not reports[m].verified),
    )
    return digest, reason
