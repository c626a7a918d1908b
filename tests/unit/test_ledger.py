"""The ledger on disk, and `verify`: an exact run passes, every planted violation is named."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.data.order import EpochOrder
from elastic_harness.data.schedule import Schedule, slot_sample_ids
from elastic_harness.errors import ConfigError
from elastic_harness.runs import verify as verification
from elastic_harness.runs.events import EventLog
from elastic_harness.runs.ledger import (
    LedgerError,
    LedgerLine,
    LedgerWriter,
    StateLine,
    follow_lineages,
    ids_hash,
    lanes_covered_once,
    read_ledger,
)

SEED, SAMPLES, SLOTS, MICRO = 7, 50, 4, 4
BATCH = SLOTS * MICRO
STEPS_PER_EPOCH = 4  # 16 + 16 + 16 + 2 samples: the last step has one short slot and three empty ones
Line = dict[str, Any]


def ledger_line(step: int, lineage: int = 0, from_step: int = 0, world: int = 2) -> Line:
    span = Schedule(SAMPLES, BATCH).at(step)
    ids = [
        slot_sample_ids(Schedule(SAMPLES, BATCH), EpochOrder(SAMPLES, SEED), step, slot, MICRO) for slot in range(SLOTS)
    ]
    cuts = [SLOTS * part // world for part in range(world + 1)]
    return {
        "lineage": lineage, "from_step": from_step, "step": step, "generation": 1, "world_size": world,
        "epoch": span.epoch, "position": span.position, "count": span.count, "slots": SLOTS, "lanes": SLOTS,
        "computed_by": [[f"m{part}", cuts[part], cuts[part + 1]] for part in range(world)],
        "slot_samples": [ids_hash(samples) for samples in ids],
        "slot_weight": [float(len(samples)) for samples in ids], "loss": 5.5 - 0.01 * step,
    }  # fmt: skip


def configured(**changes: Any) -> dict[str, Any]:
    return {
        "seed": SEED, "n_samples": SAMPLES, "slots": SLOTS, "lanes": SLOTS, "micro_batch_samples": MICRO,
        "global_batch_samples": BATCH, "dataset": {"sha256": "abc"},
    } | changes  # fmt: skip


def write_run(folder: Path, lines: list[Line], version: int | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").unlink(missing_ok=True)
    log = EventLog(folder / "events.jsonl")
    log.emit("run_started", schema=1, lineage=0)
    log.emit("run_configured", **configured(**changes))
    if version is not None:
        log.emit("run_finished", status="finished", weights_sha256="f00d", version=version, final_loss=1.0)
    log.close()
    return folder


def test_exact_run_over_two_epochs_with_a_short_tail_passes(tmp_path: Path) -> None:
    verdict = verification.verify(write_run(tmp_path, [ledger_line(step) for step in range(10)], version=10))
    assert verdict.ok, verdict.violations
    assert (verdict.steps, verdict.samples, verdict.epochs_complete) == (10, 2 * SAMPLES + 2 * BATCH, 2)
    assert verdict.finished and verdict.weights_sha256 == "f00d"


def test_what_a_run_omits_must_not_count(tmp_path: Path) -> None:
    """A step of a lineage before the omission was decided on is none of its business."""
    lines = [ledger_line(step) for step in range(6)]
    lines[1]["slot_weight"][2] = 0.0
    lines[4]["slot_weight"] = [0.0] * SLOTS
    told = [[1, 2, [2], "training.omit", 0], [4, 5, [], "a spike", 0], [2, 3, [1], "decided later", 3]]
    verdict = verification.verify(write_run(tmp_path / "right", lines, version=6, omissions=told))
    assert verdict.ok and (verdict.omitted, verdict.left_out) == (1 + SLOTS, 0), verdict.violations
    assert f"{1 + SLOTS} slots of them were omitted" in str(verdict)
    lines[4]["slot_weight"][1] = 1.0
    verdict = verification.verify(write_run(tmp_path / "wrong", lines, version=6, omissions=told))
    assert verdict.violations == ("step 4: slot 1 counts, although the run omits it (a spike)",)


def test_skipped_updates_are_counted_and_a_loss_that_is_nan_is_no_contradiction(tmp_path: Path) -> None:
    lines = [ledger_line(step) for step in range(6)]
    for step in (2, 4):
        lines[step] |= {"loss": float("nan"), "skipped": "the loss of 1 of 4 slots is not finite (slot 3)"}
    nodes = [write_run(tmp_path / name, lines, version=6) for name in "ab"]
    verdict = verification.verify(*nodes)
    assert verdict.ok and verdict.skipped == 2, verdict.violations
    assert "2 of them had an update that a policy has skipped" in str(verdict)
    with LedgerWriter(tmp_path / "again") as ledger:
        for line in lines:
            ledger.append(line)
    reread = read_ledger(tmp_path / "again").lines
    assert [line.skipped for line in reread] == [line.get("skipped", "") for line in lines]
    assert "skipped" not in (tmp_path / "again").read_text().splitlines()[0]


def swap_slots(lines: list[Line]) -> None:
    lines[3]["slot_samples"] = list(lines[2]["slot_samples"])


def repeat_slot(lines: list[Line]) -> None:
    lines[2]["slot_samples"][1] = lines[1]["slot_samples"][3]


def foreign_hash(lines: list[Line]) -> None:
    lines[5]["slot_samples"][2] = "0" * 16


def missing_step(lines: list[Line]) -> None:
    del lines[4]


def lane_twice(lines: list[Line]) -> None:
    lines[6]["computed_by"] = [["m0", 0, 3], ["m1", 2, 4]]


def lane_by_nobody(lines: list[Line]) -> None:
    lines[6]["computed_by"] = [["m0", 0, 1], ["m1", 2, 4]]


def lanes_short(lines: list[Line]) -> None:
    lines[6]["computed_by"] = [["m0", 0, 3]]


def lane_outside(lines: list[Line]) -> None:
    lines[6]["computed_by"] = [["m0", 0, 3], ["m1", 3, 5]]


def wrong_position(lines: list[Line]) -> None:
    lines[1]["position"] += 1


def wrong_epoch(lines: list[Line]) -> None:
    lines[4]["epoch"] = 0


def wrong_count(lines: list[Line]) -> None:
    lines[3]["count"] = BATCH


def weight_of_an_empty_slot(lines: list[Line]) -> None:
    lines[3]["slot_weight"][3] = 4.0


def fewer_slots(lines: list[Line]) -> None:
    lines[2]["slots"] = 2


def hash_left_out(lines: list[Line]) -> None:
    del lines[2]["slot_samples"][3]


def recorded_twice(lines: list[Line]) -> None:
    lines.append(dict(lines[2], loss=0.0))


def recorded_twice_alike(lines: list[Line]) -> None:
    lines.append(dict(lines[2]))


def ends_early(lines: list[Line]) -> None:
    del lines[-1]


PLANTED: list[tuple[Callable[[list[Line]], None], str, str]] = [
    (swap_slots, "step 3", "step 2 slot 0, which are used twice"),
    (repeat_slot, "step 2", "slot 1 read the samples of step 1 slot 3, which are used twice"),
    (foreign_hash, "step 5", "slot 2 read samples of no slot"),
    (missing_step, "step 4", "missing from the ledger"),
    (lane_twice, "step 6", "lane 2 was computed by both m0 and m1"),
    (lane_by_nobody, "step 6", "lane 1 was computed by nobody"),
    (lanes_short, "step 6", "lane 3 was computed by nobody"),
    (lane_outside, "step 6", "lanes [3, 5)"),
    (wrong_position, "step 1", "from position 17"),
    (wrong_epoch, "step 4", "(epoch 0); the schedule says"),
    (wrong_count, "step 3", "consumed 16 samples"),
    (weight_of_an_empty_slot, "step 3", "slot 3 has weight 4.0 but no samples"),
    (fewer_slots, "step 2", "recorded with 2 slots"),
    (hash_left_out, "step 2", "3 sample hashes"),
    (recorded_twice, "step 2", "recorded twice in lineage 0, with different content"),
    (recorded_twice_alike, "step 2", "recorded twice in lineage 0"),
    (ends_early, "step 8", "finished at version 10"),
]


@pytest.mark.parametrize(("plant", "where", "what"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_planted_violation_is_the_first_one_named(
    tmp_path: Path, plant: Callable[[list[Line]], None], where: str, what: str
) -> None:
    lines = [copy.deepcopy(ledger_line(step)) for step in range(10)]
    plant(lines)
    verdict = verification.verify(write_run(tmp_path, lines, version=10))
    assert not verdict.ok
    assert verdict.violations[0].startswith(where + ":")
    assert what in verdict.violations[0]
    assert verification.main([str(tmp_path)]) == 1


def test_a_slot_that_was_read_and_left_out_is_counted(tmp_path: Path) -> None:
    lines = [copy.deepcopy(ledger_line(step)) for step in range(10)]
    lines[0]["slot_weight"][0] = 0.0
    verdict = verification.verify(write_run(tmp_path, lines, version=10))
    assert verdict.ok and verdict.left_out == 1 and "1 slots of them were read and left out" in str(verdict)


def test_the_name_of_a_slots_samples_is_as_documented() -> None:
    """Workers and `verify` call one function, so a change of it would go unnoticed there, and break older ledgers."""
    expected = hashlib.sha256(struct.pack("<3q", 5, 0, 1 << 40)).hexdigest()[:16]
    assert ids_hash(np.array([5, 0, 1 << 40])) == expected


def test_sample_used_twice_by_a_broken_order_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the order itself repeats a sample, hashes agree with it; the count of uses does not."""
    monkeypatch.setattr(
        "elastic_harness.data.order.epoch_order", lambda n, seed, epoch: lambda positions: positions // 2
    )
    lines = [ledger_line(step) for step in range(STEPS_PER_EPOCH)]
    for line in lines:
        first = line["position"]
        ids = [np.arange(first, first + line["count"])[slot * MICRO : (slot + 1) * MICRO] // 2 for slot in range(SLOTS)]
        line["slot_samples"] = [ids_hash(samples) for samples in ids]
    verdict = verification.verify(write_run(tmp_path, lines))
    assert any("uses sample 0 a second time in epoch 0" in text for text in verdict.violations)
    assert any("never used" in text for text in verdict.violations)


def test_restored_lineage_supersedes_the_older_one(tmp_path: Path) -> None:
    old = [ledger_line(step) for step in range(7)]
    old[5]["slot_samples"][0] = "0" * 16  # wrong, but it does not count any more
    lines = old + [ledger_line(step, lineage=1, from_step=4) for step in range(4, 9)]
    verdict = verification.verify(write_run(tmp_path, lines, version=9))
    assert verdict.ok, verdict.violations
    assert (verdict.lineage, verdict.superseded, verdict.steps) == (1, 3, 9)


def test_gap_between_lineages_is_a_violation(tmp_path: Path) -> None:
    lines = [ledger_line(step) for step in range(4)]
    lines += [ledger_line(step, lineage=1, from_step=3) for step in range(4, 6)]
    verdict = verification.verify(write_run(tmp_path, lines))
    assert verdict.violations[0].startswith("step 3: is missing")


def test_identity_that_changed_on_resume_is_a_violation(tmp_path: Path) -> None:
    write_run(tmp_path, [ledger_line(0)])
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("run_configured", **configured(seed=8))
    log.close()
    assert "seed was 7 when the run began and 8" in verification.verify(tmp_path).violations[0]


def test_data_that_changed_on_resume_is_a_violation(tmp_path: Path) -> None:
    write_run(tmp_path, [ledger_line(0)])
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("run_configured", **configured(dataset={"sha256": "def"}))
    log.close()
    assert "data set changed" in verification.verify(tmp_path).violations[0]


def test_wrong_seed_is_noticed(tmp_path: Path) -> None:
    verdict = verification.verify(write_run(tmp_path, [ledger_line(0)], seed=SEED + 1))
    assert verdict.violations[0].startswith("step 0: slot 0")


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, [ledger_line(step) for step in range(3)])
    with open(tmp_path / "ledger.jsonl", "a") as file:
        file.write('{"lineage": 0, "from_st')
    verdict = verification.verify(tmp_path)
    assert verdict.ok and verdict.torn_line and verdict.steps == 3


def test_what_cannot_be_judged_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LedgerError, match="no ledger here"):
        verification.verify(tmp_path)
    (tmp_path / "ledger.jsonl").write_text(json.dumps(ledger_line(0)) + "\n")
    with pytest.raises(ConfigError, match="run_configured"):
        verification.verify(tmp_path)
    assert verification.main([str(tmp_path)]) == 2
    assert "run_configured" in capsys.readouterr().err


def test_json_output_holds_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [ledger_line(step) for step in range(3)])
    assert verification.main([str(tmp_path), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"] is True and verdict["steps"] == 3 and verdict["violations"] == []


def test_a_run_is_named_by_its_id_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("first", "job@a", "job@b"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        write_run(tmp_path / "runs" / folder, [ledger_line(step) for step in range(3)])
    (tmp_path / "first").mkdir()  # it holds no run
    monkeypatch.chdir(tmp_path)
    assert verification.main(["first"]) == 0
    assert verification.main(["job", "--json"]) == 0, "all nodes of a run that are here"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["run"] == "runs/job@a runs/job@b"
    assert verification.main(["secnd"]) == 2
    assert "neither secnd nor runs/secnd is there" in capsys.readouterr().err


def test_writer_records_each_step_once_across_restarts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with LedgerWriter(path) as writer:
        assert writer.append(ledger_line(0)) and writer.append(ledger_line(1))
        assert not writer.append(ledger_line(1))
        writer.sync()
    with LedgerWriter(path) as writer:
        assert (0, 1) in writer.reached and len(writer.reached) == 2
        assert not writer.append(ledger_line(0))
        assert writer.append(ledger_line(1, lineage=1, from_step=1))
    assert [line.key for line in read_ledger(tmp_path).lines] == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("torn", ['{"lineage"', '{"lineage": 0}\x00\n', "\x00\x00"])
def test_writer_cuts_a_torn_last_line_and_goes_on(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(ledger_line(0)) + "\n" + torn)
    with LedgerWriter(path) as writer:
        assert writer.append(ledger_line(1))
    ledger = read_ledger(path)
    assert [line.step for line in ledger.lines] == [0, 1] and not ledger.torn


@pytest.mark.parametrize("damage", ["nonsense", '{"lineage": 0}', "[]", "\0" * 40])
def test_a_damaged_line_is_told_of_and_proves_nothing(tmp_path: Path, damage: str) -> None:
    """The run goes on; the proof lacks that step, and says why."""
    lines = [json.dumps(ledger_line(step)) for step in range(4)]
    write_run(tmp_path, [])
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join([*lines[:2], damage, *lines[2:], ""]))
    assert verification.verify(tmp_path).ok and f"at byte {len(lines[0]) + len(lines[1]) + 2}" in str(
        verification.verify(tmp_path)
    )
    path.write_text("\n".join([*lines[:2], damage, *lines[3:], ""]))
    with LedgerWriter(path) as writer:
        assert len(writer.damaged) == 1 and writer.reached.committed == 3
    verdict = verification.verify(tmp_path)
    assert verdict.violations[0].startswith("step 2: is missing") and "1 damaged line was passed over" in str(verdict)


def test_line_that_lacks_a_field_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    broken = ledger_line(0)
    del broken["computed_by"]
    with LedgerWriter(path) as writer, pytest.raises(LedgerError, match="computed_by"):
        writer.append(broken)
    assert path.read_bytes() == b""


def in_rows(line: Line) -> Line:
    """As two replicas of two shards compute it: each of their members takes part in all lanes of its row."""
    rows = [["m0", "n0"], ["m1", "n1"]]
    both = [[member, lo, hi] for row, (_, lo, hi) in zip(rows, line["computed_by"], strict=True) for member in row]
    return line | {"computed_by": both, "replicas": rows, "world_size": 4}


def test_of_several_shards_each_has_all_lanes(tmp_path: Path) -> None:
    lines = [in_rows(ledger_line(step)) for step in range(2)]
    verdict = verification.verify(write_run(tmp_path / "whole", lines))
    assert verdict.ok and verdict.members == 4, verdict.violations
    del lines[1]["computed_by"][3]  # the second shard of the second row
    (violation,) = verification.verify(write_run(tmp_path / "torn", lines)).violations
    assert "lane 2 was computed by nobody" in violation
    line = LedgerLine.from_json(LedgerLine.from_json(in_rows(ledger_line(0))).to_json())
    assert line.replicas == (("m0", "n0"), ("m1", "n1"))
    with pytest.raises(LedgerError):
        LedgerLine.from_json(in_rows(ledger_line(0)) | {"replicas": [["m0", "n0"], ["m1"]]})


def test_line_survives_the_round_trip() -> None:
    line = LedgerLine.from_json(ledger_line(3))
    assert LedgerLine.from_json(json.loads(json.dumps(line.to_json()))) == line


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_following_lineages_equals_replaying_them_one_by_one(starts: list[int]) -> None:
    """Lineage k restores at a step that exists and goes on for three; the last writer of a step counts."""
    lines, expected = [], {}
    end = 0
    for lineage, wanted in enumerate(starts):
        start = min(wanted, end) if lineage else 0
        end = start + 3
        expected = {step: owner for step, owner in expected.items() if step < start}
        for step in range(start, end):
            lines.append(LedgerLine.from_json(ledger_line(step, lineage, start)))
            expected[step] = lineage
    assert {step: line.lineage for step, line in follow_lineages(lines).items()} == expected


@given(st.integers(1, 40), st.sets(st.integers(1, 39)))
def test_any_cut_of_the_lanes_covers_them_and_any_hole_or_overlap_does_not(lanes: int, inner: set[int]) -> None:
    cuts = [0, *sorted(cut for cut in inner if cut < lanes), lanes]
    parts = [(f"m{index}", low, high) for index, (low, high) in enumerate(itertools.pairwise(cuts))]
    assert lanes_covered_once(list(reversed(parts)), lanes) is None
    for index in range(len(parts)):
        assert lanes_covered_once(parts[:index] + parts[index + 1 :], lanes) is not None
        assert lanes_covered_once([*parts, parts[index]], lanes) is not None


def test_the_ledgers_of_several_nodes_are_judged_together(tmp_path: Path) -> None:
    lines = [ledger_line(step) for step in range(10)]
    first = write_run(tmp_path / "a", lines[:-2], version=10)
    second = write_run(tmp_path / "b", lines[2:], version=10)
    assert not verification.verify(first).ok and not verification.verify(second).ok
    verdict = verification.verify(first, second)
    assert verdict.ok and verdict.steps == 10, str(verdict)
    third = write_run(tmp_path / "c", [{**lines[3], "loss": 0.5}], version=10)
    assert "recorded twice" in verification.verify(first, second, third).violations[0]


def test_nodes_that_finish_with_different_weights_are_named(tmp_path: Path) -> None:
    lines = [ledger_line(step) for step in range(10)]
    first, second = (write_run(tmp_path / name, lines, version=10) for name in "ab")
    events = second / "events.jsonl"
    finished = json.loads(events.read_text().splitlines()[-1])
    with events.open("a") as file:
        file.write(json.dumps({**finished, "weights_sha256": "0" * 64}) + "\n")
    assert "different weights" in verification.verify(first, second).violations[0]


def test_nodes_may_have_computed_a_step_in_different_generations(tmp_path: Path) -> None:
    """The one that told of it was lost before the others had its data."""
    lines = [ledger_line(step) for step in range(10)]
    first = write_run(tmp_path / "a", lines[:4], version=None)
    again = {**lines[3], "generation": 2, "world_size": 1, "computed_by": [["m0", 0, SLOTS]]}
    second = write_run(tmp_path / "b", [*lines[:3], again, *lines[4:]], version=10)
    assert verification.verify(first, second).ok
    twice = write_run(tmp_path / "c", [*lines[:4], again], version=None)
    assert "recorded twice" in verification.verify(twice).violations[0]


def test_a_node_that_was_away_when_the_others_trained_on_says_nothing_of_the_end(tmp_path: Path) -> None:
    lines = [ledger_line(step) for step in range(10)]
    first = write_run(tmp_path / "a", lines[:6], version=6)
    verdict = verification.verify(first, write_run(tmp_path / "b", lines, version=10))
    assert verdict.ok and verdict.steps == 10


# ---- hand-overs of the whole state


def side(holder: str, taken_from: str | None = None, version: int = 4, state: str = "f00d", **changes: Any) -> Line:
    line = {"kind": "state", "state": state, "lineage": 0, "version": version, "generation": 2, "holder": holder}
    return {**line, "taken_from": taken_from, **changes}


def joined(member: str, source: str, version: int, generation: int = 2, **more: Any) -> dict[str, Any]:
    return {"event": "worker_joined", "member": member, "generation": generation, "version": version,
            "source": source, **more}  # fmt: skip


def judged(folder: Path, states: list[Line], *events: dict[str, Any], later: int | None = None) -> Any:
    """The verdict on six steps (and six of a lineage that began `later`) with these lines and events."""
    lines = [ledger_line(step) for step in range(6)]
    if later is not None:
        lines += [ledger_line(step, 1, later) for step in range(later, 6)]
    write_run(folder, [*lines, *states])
    log = EventLog(folder / "events.jsonl")
    for event in events:
        log.emit(**event)
    log.close()
    return verification.verify(folder)


def test_a_state_that_arrived_as_it_was_given_is_proven(tmp_path: Path) -> None:
    states = [side("m0"), side("m2", "m0"), side("checkpoint", version=0), side("m0", "checkpoint", version=0)]
    verdict = judged(tmp_path, states, joined("m2", "state", 4), joined("m0", "restore", 0), joined("m1", "init", 0))
    assert verdict.ok and (verdict.handovers, verdict.unproven) == (2, 0), verdict
    assert "2 of 2 joins and restores took over the whole state as it was given" in str(verdict)


def test_a_state_that_did_not_survive_is_no_exact_run(tmp_path: Path) -> None:
    verdict = judged(tmp_path, [side("m0"), side("m2", "m0", state="bad")])
    assert not verdict.ok
    assert verdict.violations[0].startswith("step 4: m2 took over the state from m0"), verdict
    assert "hash bad, given f00d" in verdict.violations[0]


@pytest.mark.parametrize(("later", "ok"), [(3, True), (4, False), (5, False)])
def test_only_what_was_superseded_since_does_not_count(tmp_path: Path, later: int, ok: bool) -> None:
    verdict = judged(tmp_path, [side("m0"), side("m2", "m0", state="bad")], later=later)
    assert verdict.ok == ok, verdict
    assert verdict.handovers == (0 if ok else 1)


def test_a_giver_that_is_two_is_a_violation(tmp_path: Path) -> None:
    assert not judged(tmp_path, [side("m0"), side("m0", state="other"), side("m2", "m0")]).ok


def test_what_an_older_version_did_not_write_is_said_not_to_be_proven(tmp_path: Path) -> None:
    events = [joined("m2", "state", 4, lineage=0), joined("m2", "state", 4, lineage=0), joined("m3", "restore", 2)]
    verdict = judged(tmp_path, [side("m4", "m0", version=5)], *events)
    assert verdict.ok and (verdict.handovers, verdict.unproven) == (3, 3), verdict
    assert "not proven: of 3 the ledger lacks a hash of the state" in str(verdict)


def test_the_two_sides_may_be_in_the_folders_of_two_nodes(tmp_path: Path) -> None:
    one, two = tmp_path / "run@a", tmp_path / "run@b"
    lines = [ledger_line(step) for step in range(6)]
    write_run(one, [*lines, side("m0")])
    write_run(two, [*lines, side("m2", "m0")])
    assert verification.verify(two).unproven == 1
    verdict = verification.verify(one, two)
    assert verdict.ok and (verdict.handovers, verdict.unproven) == (1, 0), verdict


def test_a_line_about_a_state_is_written_once_and_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        with LedgerWriter(path) as writer:
            appended = [writer.append(line) for line in (side("m0"), side("m2", "m0"), ledger_line(0), side("m0"))]
            assert len(writer.reached) == 1
    assert appended == [False] * 4
    ledger = read_ledger(path)
    assert ledger.states == tuple(StateLine.from_json(line) for line in (side("m0"), side("m2", "m0")))
    assert [line.key for line in ledger.lines] == [(0, 0)] and len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("name", ["state", "lineage", "version", "generation", "holder", "taken_from"])
def test_a_line_about_a_state_with_a_wrong_field_is_refused(name: str) -> None:
    with pytest.raises(LedgerError, match=name):
        StateLine.from_json(side("m0") | {name: True})
