"""What is found where a step that is computed again came out otherwise, and where such a replay begins."""

from __future__ import annotations

import errno
import math
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_harness.checkpoint.disk import local
from elastic_harness.commands import recompute
from elastic_harness.commands.recorded import Recorded, find
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.runs import replayed
from elastic_harness.runs.events import EventLog
from elastic_harness.runs.ledger import LedgerLine
from elastic_harness.runs.replayed import ReplayOrder, differences


def line(step: int = 4, lineage: int = 0, **changes: Any) -> LedgerLine:
    """A step of three slots in three lanes, the first two computed by one worker."""
    known = LedgerLine(
        lineage=lineage, from_step=0, step=step, generation=1, world_size=2, epoch=0, position=12 * step, count=12,
        slots=3, lanes=3, computed_by=(("w0-1", 0, 2), ("w1-1", 2, 3)), slot_samples=("ab" * 8, "cd" * 8, "ef" * 8),
        slot_weight=(1.0, 1.0, 0.5), loss=2.5, gradient="12" * 8, slot_losses=("0123", "4567", "89ab"),
    )  # fmt: skip
    return replace(known, **changes)


def said(recorded: LedgerLine, computed: LedgerLine) -> list[str]:
    return [str(each) for each in differences(recorded, computed)]


def by(members: str) -> str:
    return f"computed by {members} when it was recorded, by {members} now"


# ---- what came out otherwise


def test_the_same_bits_are_no_difference_whoever_computed_them() -> None:
    others = line(computed_by=(("w7-3", 0, 3),), lineage=2, from_step=3, generation=9, world_size=1)
    assert differences(line(), others) == []
    assert differences(line(loss=math.nan), line(loss=-math.nan)) == []


def test_what_was_not_recorded_is_not_compared() -> None:
    old = line(gradient="", slot_losses=())
    assert differences(old, line()) == [] == differences(line(), old)
    assert said(old, line(loss=2.75)) == ["loss: recorded 2.5, computed 2.75"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": math.nextafter(2.5, 3)}, f"loss: recorded 2.5, computed {math.nextafter(2.5, 3)!r}"),
        ({"loss": math.nan}, "loss: recorded 2.5, computed nan"),
        ({"gradient": "34" * 8}, f"hash of the gradient: recorded '{'12' * 8}', computed '{'34' * 8}'"),
        ({"skipped": "NaN"}, "why the update was skipped: recorded '', computed 'NaN'"),
        ({"position": 60}, "position in the data: recorded 48, computed 60"),
        ({"slot_losses": ("0123", "4567", "0000")}, f"loss of slot 2, {by('w1-1')}"),
        ({"slot_losses": ("0", "0", "0")}, f"loss of slots 0, 1, 2, {by('w0-1, w1-1')}"),
        ({"slot_weight": (0.0, 1.0, 0.5)}, f"weight of slot 0, {by('w0-1')}"),
        ({"slot_samples": ("ab" * 8,) * 3}, f"samples of slots 1, 2, {by('w0-1, w1-1')}"),
    ],
)
def test_each_fact_is_compared(changes: dict[str, Any], expected: str) -> None:
    assert said(line(), line(**changes)) == [expected]


def test_who_computed_a_slot_now_is_named_too() -> None:
    other = line(computed_by=(("w5-1", 0, 3),), slot_losses=("0123", "4567", "0000"))
    assert said(line(), other) == ["loss of slot 2, computed by w1-1 when it was recorded, by w5-1 now"]


def test_zeros_of_two_signs_differ() -> None:
    assert said(line(loss=0.0), line(loss=-0.0)) == ["loss: recorded 0.0, computed -0.0"]


def test_another_number_of_slots_is_all_that_is_said() -> None:
    other = line(slots=2, lanes=2, slot_weight=(1.0, 1.0), slot_samples=("00" * 8,) * 2, slot_losses=("0000",) * 2)
    assert said(line(), other) == [
        "number of slots: recorded 3, computed 2",
        "number of lanes: recorded 3, computed 2",
    ]


# ---- what a replay is told, and where it begins


def test_the_order_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert replayed.read(tmp_path) is None
    order = ReplayOrder("/runs/a", 4, 6, None, {"torch": "2", "run.lanes": 3})
    order.write(tmp_path)
    assert replayed.read(tmp_path) == order
    (tmp_path / replayed.FILE).write_text("{}")
    with pytest.raises(InfrastructureError, match=r"replay\.json cannot be read"):
        replayed.read(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    """Steps 0 … 3 of lineage 0 and 4 … 9 of lineage 1, which began at version 4, and checkpoints of both."""
    for version, lineage in ((4, 0), (6, 0), (8, 1)):
        folder = tmp_path / "checkpoints"
        folder.mkdir(exist_ok=True)
        local.save(folder, version, {"x": 1}, {"w": torch.zeros(2)}, {"lineage": lineage})
    lines = {step: line(step, lineage=int(step >= 4)) for step in range(10)}
    return Recorded((tmp_path,), {"argv": ["script.py"]}, lines)


@pytest.mark.parametrize(("step", "version"), [(3, None), (4, 4), (5, 4), (6, 4), (7, 4), (8, 8), (9, 8)])
def test_it_begins_with_the_nearest_checkpoint_that_no_later_lineage_has_superseded(
    run: Recorded, step: int, version: int | None
) -> None:
    found = run.beginning(step)
    assert (None if found is None else found.step) == version


def test_a_step_is_computed_with_the_arguments_that_it_was_trained_with(
    run: Recorded, tmp_path: Path
) -> None:
    """Twice the run was resumed with others; step 5 was committed in both lineages."""
    assert run.launched_with(3, 9) == [["script.py"]] * 2, "the events do not tell"
    with closing(EventLog(tmp_path / "events.jsonl")) as log:
        for argv, lineage, steps in ((["a.py"], 0, range(6)), (["b.py"], 1, range(4, 8)), (["c.py"], 1, range(8, 10))):
            log.emit("run_started", argv=argv, lineage=lineage)
            for step in steps:
                log.emit("step_committed", step=step, lineage=lineage)
    assert run.launched_with(3, 5, 7, 8, 9) == [["a.py"], ["b.py"], ["b.py"], ["c.py"], ["c.py"]]


def test_a_checkpoint_that_is_removed_meanwhile_gives_way_to_an_older_one(
    run: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live run keeps its newest checkpoints only."""
    link = os.link

    def removed(source: Path, target: Path) -> None:
        if "step-00000008" in str(source) and source.name == "manifest.json":
            shutil.rmtree(source.parent)
        link(source, target)

    monkeypatch.setattr(recompute.os, "link", removed)
    found = recompute._linked(run, 9, tmp_path / "replay")
    assert found is not None and found.step == 4
    assert [path.name for path in (tmp_path / "replay" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("linked", [True, False])
def test_a_checkpoint_is_linked_or_else_copied(
    run: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not linked:
        monkeypatch.setattr(recompute.os, "link", refused)
    assert recompute._linked(run, 3, tmp_path / "replay") is None
    found = recompute._linked(run, 5, tmp_path / "replay")
    assert found is not None
    for file in found.path.iterdir():
        other = tmp_path / "replay" / "checkpoints" / found.path.name / file.name
        assert other.read_bytes() == file.read_bytes() and other.samefile(file) == linked


def test_a_step_that_is_not_there_is_said(run: Recorded, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no step 10 of .*: it has committed the steps 0 … 9 so far"):
        run.line(10)
    later = replace(run, lines={step: known for step, known in run.lines.items() if step >= 4})
    with pytest.raises(ConfigError, match="its ledger has the steps 4 … 9, not this one"):
        later.line(2)


def test_a_run_that_was_never_launched_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        find(str(tmp_path))
    (tmp_path / "ledger.jsonl").write_text("")
    with pytest.raises(ConfigError, match="was trained without `elastic-harness launch`"):
        find(str(tmp_path))
    (tmp_path / "run.json").write_text('{"argv": ["script.py"], "created": 1.0}')
    with pytest.raises(ConfigError, match="has no committed step"):
        find(str(tmp_path))
