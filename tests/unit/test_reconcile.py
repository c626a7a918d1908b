"""Who applied what, and where everyone's state comes from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.contract import wire
from elastic_harness.contract.messages import TO_AGENT, TO_WORKER
from elastic_harness.membership.codec import encode, to_text
from elastic_harness.membership.protocol import State
from elastic_harness.membership.reconcile import CHECKPOINTS_TOLD, reconcile, scattered, worth_telling
from elastic_harness.membership.replica import deal_columns, zip_rows
from elastic_harness.membership.types import Digest, Generation, Limits, Report

LANES = 6
checkpoints = st.sets(st.integers(0, 9), max_size=2).map(lambda found: tuple(sorted(found, reverse=True)))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Generation, dict[str, Report]]:
    """Any reports, also such as the protocol never produces: laggards far behind, lanes held twice."""
    members = tuple(f"w{i}" for i in range(draw(st.integers(1, 5))))
    top = draw(st.integers(-1, 5))
    reports = {}
    for member in members:
        version = draw(st.integers(-1, max(top, -1)))
        lanes = draw(st.sets(st.integers(0, LANES - 1), max_size=3)) if version >= 0 else set()
        reports[member] = Report(
            generation=7,
            version=version,
            record=draw(st.sampled_from([None, version - 1])) if version > 0 else None,
            lanes=tuple((lane, lane + 1) for lane in sorted(lanes)),
            checkpoints=draw(checkpoints) if version < 0 else (),
            verified=draw(st.booleans()),
        )
    return Generation(7, members, True, "test"), reports


def digest_of(situation: tuple[Generation, dict[str, Report]], born: bool) -> Digest:
    generation, reports = situation
    digest, reason = reconcile(generation, reports, born=born, lineage=2, from_step=1)
    assert reason
    return digest


@given(situations(), st.booleans())
def test_every_source_can_be_satisfied(situation: tuple[Generation, dict[str, Report]], born: bool) -> None:
    generation, reports = situation
    digest = digest_of(situation, born)
    assert set(digest.sources) == set(generation.members)
    for member, source in digest.sources.items():
        own = reports[member]
        match source.kind:
            case "keep":
                assert own.version == digest.version and source.donor is None
            case "replay":
                assert source.donor is not None
                donor = reports[source.donor]
                assert own.version == digest.version - 1 >= 0
                assert donor.version == digest.version and donor.record == own.version
                assert digest.sources[source.donor].kind == "keep"
            case "state":
                assert source.donor is not None and source.donor != member
                assert digest.sources[source.donor].kind in ("keep", "init", "restore")
            case "restore":
                assert digest.version in own.checkpoints
            case "init":
                assert digest.version == 0 and all(not r.checkpoints for r in reports.values())


@given(situations(), st.booleans())
def test_nothing_committed_by_anyone_present_is_lost(
    situation: tuple[Generation, dict[str, Report]], born: bool
) -> None:
    _, reports = situation
    digest = digest_of(situation, born)
    best = max(r.version for r in reports.values())
    if best >= 0:
        assert digest.version == best and (digest.lineage, digest.from_step) == (2, 1)
    elif born:
        assert digest.lineage == 3 and digest.from_step == digest.version, "a restore opens a new lineage"
        assert digest.version == max((c for r in reports.values() for c in r.checkpoints), default=0)


@given(situations(), st.booleans())
def test_every_finished_lane_counts_at_most_once(situation: tuple[Generation, dict[str, Report]], born: bool) -> None:
    _, reports = situation
    digest = digest_of(situation, born)
    held = [lane for ranges in digest.lanes.values() for lo, hi in ranges for lane in range(lo, hi)]
    assert len(held) == len(set(held))
    for member, ranges in digest.lanes.items():
        assert digest.sources[member].kind == "keep" and ranges == reports[member].lanes
    ahead = [r.lanes for m, r in reports.items() if digest.sources[m].kind == "keep" and r.lanes]
    everything = [lane for ranges in ahead for lo, hi in ranges for lane in range(lo, hi)]
    if len(everything) == len(set(everything)):
        assert sorted(held) == sorted(everything), "lanes that nobody else holds are never thrown away"


@given(situations(), st.booleans())
def test_a_digest_and_its_parts_survive_the_wire(situation: tuple[Generation, dict[str, Report]], born: bool) -> None:
    generation, reports = situation
    digest = digest_of(situation, born)
    for codec, value in ((TO_WORKER, digest), (TO_WORKER, generation), *((TO_AGENT, r) for r in reports.values())):
        (frame,) = wire.Decoder().feed(wire.encode(codec.pack(value)))
        assert codec.unpack(wire.decode(frame)) == value


@given(st.integers(2, 9), st.integers(1, 9))
def test_donors_share_the_work(keepers: int, joiners: int) -> None:
    members = tuple(f"w{i}" for i in range(keepers + joiners))
    reports = {m: Report(3, 8, record=7) if i < keepers else Report(3, -1) for i, m in enumerate(members)}
    digest, _ = reconcile(Generation(3, members, False, ""), reports, born=True, lineage=0, from_step=0)
    loads = [sum(s.donor == m for s in digest.sources.values()) for m in members[:keepers]]
    assert max(loads) - min(loads) <= 1


def test_a_checkpoint_that_a_later_lineage_superseded_is_not_offered() -> None:
    """Node a went on from version 5 without b, which holds a newer one of before."""
    reports = {
        "a": Report(7, -1, checkpoints=(10, 5), lineages=(1, 0)),
        "b": Report(7, -1, checkpoints=(14, 5), lineages=(0, 0)),
    }
    digest, _ = reconcile(Generation(7, ("a", "b"), True, ""), reports, born=True, lineage=1, from_step=5)
    assert (digest.version, digest.lineage, digest.from_step) == (10, 2, 10)
    assert digest.sources["a"].kind == "restore"


@st.composite
def histories(draw: st.DrawFn) -> tuple[Report, list[tuple[int, int]]]:
    """Checkpoints as a run leaves them, some removed again, and the (lineage, from_step) that it has been through."""
    begun, stored, version = [(0, 0)], dict[int, int](), 0
    for lineage in range(draw(st.integers(1, 4))):
        if lineage:
            version = draw(st.sampled_from(sorted(stored))) if stored else 0
            begun.append((lineage, version))
        end = version + draw(st.integers(0, 40))
        for at in range(version + 1, end + 1):
            stored[at] = lineage
        version = end
    removed = draw(st.sets(st.sampled_from(sorted(stored)))) if stored else set()
    kept = {at: of for at, of in sorted(stored.items(), reverse=True) if at not in removed}
    return Report(7, -1, checkpoints=tuple(kept), lineages=tuple(kept.values())), begun


def restored(report: Report, lineage: int, from_step: int) -> int | None:
    digest, _ = reconcile(
        Generation(7, ("w0",), True, ""), {"w0": report}, born=True, lineage=lineage, from_step=from_step
    )
    return digest.version if digest.sources["w0"].kind == "restore" else None


@given(histories(), st.data())
def test_few_checkpoints_are_told_and_none_is_missed(
    history: tuple[Report, list[tuple[int, int]]], data: st.DataObject
) -> None:
    report, begun = history
    known = data.draw(st.sampled_from(begun), "what the node knows")
    told = worth_telling(report, *known)
    assert len(told.checkpoints) <= CHECKPOINTS_TOLD + len(report.checkpoints).bit_length() + 2
    assert set(zip(told.checkpoints, told.lineages, strict=True)) <= set(
        zip(report.checkpoints, report.lineages, strict=True)
    )
    assert list(told.checkpoints) == sorted(told.checkpoints, reverse=True)
    assert restored(told, *known) == restored(report, *known)
    later = data.draw(st.sampled_from(begun[begun.index(known) :]), "what the leader knows")
    assert (restored(told, *later) is None) == (restored(report, *later) is None), "nobody begins at 0 for that"


@pytest.mark.slow
def test_the_reports_of_a_thousand_members_fit_into_a_request() -> None:
    """etcd takes 1.5 MiB; the leader's state holds the reports of all members."""
    rng = random.Random(1)
    reports = {}
    for node in range(125):
        versions = tuple(sorted(rng.sample(range(10**6), 2000), reverse=True))
        for worker in range(8):
            report = Report(7, -1, checkpoints=versions, lineages=(0,) * 2000)
            reports[f"node-{node:03d}-1f2e3d/w{worker}"] = report
    sizes = []
    for told in (reports, {m: worth_telling(report, 0, 0) for m, report in reports.items()}):
        sizes.append(len(to_text(encode(State(Limits(1, 1000, 1000), ready=tuple(told), reports=tuple(told.items()))))))
    assert sizes[1] < 200_000 < 3 << 19 < sizes[0]


def test_state_of_a_superseded_lineage_does_not_count() -> None:
    """Node a was cut off and kept its state. The others were lost, and went on from version 9 without it."""
    reports = {
        "a": Report(7, 15, record=14, lanes=((0, 1),), lineage=0),
        "b": Report(7, 12, record=11, lineage=1),
        "c": Report(7, 11, lineage=1),
    }
    generation = Generation(7, ("a", "b", "c"), True, "")
    digest, _ = reconcile(generation, reports, born=True, lineage=1, from_step=9)
    assert (digest.version, digest.lineage, digest.lanes) == (12, 1, {})
    assert {m: source.kind for m, source in digest.sources.items()} == {"a": "state", "b": "keep", "c": "replay"}
    reports |= {"b": Report(7, -1, checkpoints=(9,), lineages=(0,)), "c": Report(7, -1)}
    digest, _ = reconcile(generation, reports, born=True, lineage=1, from_step=9)
    assert (digest.version, digest.lineage, digest.sources["b"].kind) == (9, 2, "restore")


# ---- several shards


def in_shards(members: str, shards: int, held: dict[str, int] | None = None) -> Generation:
    """A generation whose members are single letters, dealt to columns as `decide` does."""
    columns = deal_columns(members, held or {}, shards)
    shard_of = {member: shard for shard, column in enumerate(columns) for member in column}
    rows, _ = zip_rows(columns, ())
    return Generation(7, tuple(members), True, "test", tuple(shard_of[m] for m in members), rows)


@st.composite
def sharded_situations(draw: st.DrawFn) -> tuple[Generation, dict[str, Report], int]:
    """Reports as the seal allows them, and the farthest version: who is not there has sealed the step before it, or has
    nothing. Some columns have lost their shard."""
    shards = draw(st.integers(2, 3))
    generation = in_shards("abcdefgh"[: draw(st.integers(shards, 8))], shards)
    version = draw(st.integers(1, 4))
    reports = {}
    for member in generation.members:
        state = draw(st.sampled_from(["ahead", "sealed", "nothing"]))
        own = {"ahead": version, "sealed": version - 1, "nothing": -1}[state]
        lanes = draw(st.sets(st.integers(0, LANES - 1), max_size=3)) if own >= 0 else set[int]()
        reports[member] = Report(
            generation=7,
            version=own,
            record=own - 1 if own > 0 else None,
            lanes=tuple((lane, lane + 1) for lane in sorted(lanes)),
            checkpoints=draw(checkpoints),
            shard=generation.shard_of[member],
            sealed=state == "sealed",
        )
    return generation, reports, version


@given(sharded_situations())
def test_every_column_comes_to_the_same_version(situation: tuple[Generation, dict[str, Report], int]) -> None:
    generation, reports, version = situation
    digest, reason = reconcile(generation, reports, born=True, lineage=2, from_step=1)
    assert reason and list(digest.sources) == list(generation.members)
    ahead = [m for m, r in reports.items() if r.version == version]
    if not ahead:  # the farthest have sealed a step that nobody has committed: it is done again
        version -= 1
    reach = {version, version - 1} if ahead else {version}
    whole = all(any(reports[m].version in reach for m in column) for column in generation.columns)
    if version < 0 or not whole:
        assert {source.kind for source in digest.sources.values()} <= {"restore", "init", "state"}
        assert digest.lineage == 3 and digest.from_step == digest.version
        offered = [{v for m in column for v in reports[m].checkpoints} for column in generation.columns]
        assert digest.version == max(set.intersection(*offered), default=0), "the newest that all columns can read"
        for column in generation.columns:
            (first,) = [m for m in column if digest.sources[m].kind != "state"]
            assert digest.version == 0 or digest.version in reports[first].checkpoints
            assert all(digest.sources[m].donor == first for m in column if m != first)
        return
    assert digest.version == version and digest.lineage == 2
    for member, source in digest.sources.items():
        column = generation.columns[generation.shard_of[member]]
        match source.kind:
            case "keep":
                assert reports[member].version == version
            case "forward":
                assert reports[member].version == version - 1 >= 0 and reports[member].sealed
                assert source.donor in ahead
            case "state":
                assert source.donor in column and digest.sources[source.donor].kind in ("keep", "forward")
                assert reports[member].version < version
            case _:
                raise AssertionError(source)


@given(sharded_situations())
def test_a_row_keeps_the_lanes_that_all_of_it_hold(situation: tuple[Generation, dict[str, Report], int]) -> None:
    generation, reports, _ = situation
    digest, _ = reconcile(generation, reports, born=True, lineage=2, from_step=1)
    seen: list[int] = []
    for row in generation.rows:
        kept = [{lane for lo, hi in digest.lanes.get(m, ()) for lane in range(lo, hi)} for m in row]
        held = [{lane for lo, hi in reports[m].lanes for lane in range(lo, hi)} for m in row]
        assert all(each == kept[0] for each in kept)
        assert kept[0] in (set(), set.intersection(*held))
        assert not kept[0] or all(digest.sources[m].kind == "keep" for m in row)
        seen += kept[0]
    assert len(seen) == len(set(seen)), "every lane counts once"
    assert digest.lanes.keys() <= {m for row in generation.rows for m in row}, "who is left over holds none"


def test_who_has_sealed_goes_forward_and_then_serves() -> None:
    """a has committed and d joins. b has sealed: it needs nobody's record, and only then has what d is to have."""
    generation = in_shards("abd", 2, {"a": 0, "b": 1, "d": 1})
    reports = {"a": Report(7, 5, 4), "b": Report(7, 4, 3, shard=1, sealed=True), "d": Report(7, -1, shard=1)}
    digest, reason = reconcile(generation, reports, born=True, lineage=0, from_step=0)
    assert reason == "resume at version 5: 1 keep, 1 go forward, 0 replay, 1 take the state"
    kinds = {member: (source.kind, source.donor) for member, source in digest.sources.items()}
    assert kinds == {"a": ("keep", None), "b": ("forward", "a"), "d": ("state", "b")}


def test_the_state_of_another_shard_is_none() -> None:
    generation = in_shards("abc", 2, {"a": 0, "b": 1, "c": 1})
    reports = {"a": Report(7, 5, 4), "b": Report(7, 5, 4, shard=1), "c": Report(7, 5, 4, shard=0)}
    digest, _ = reconcile(generation, reports, born=True, lineage=0, from_step=0)
    assert digest.sources["c"].kind == "state" and digest.sources["c"].donor == "b"
    assert scattered(generation, reports, 0), "the leader is to put c where its state counts"
    assert not scattered(generation, {**reports, "c": Report(7, 5, 4, shard=1)}, 0)
    exchanged = {"a": Report(7, 5, 4, shard=1), "b": Report(7, 5, 4, shard=0), "c": Report(7, -1)}
    assert scattered(generation, exchanged, 0)
    assert not scattered(generation, {**exchanged, "b": Report(7, 5, 4, shard=1)}, 0), "shard 0 is lost in any case"
