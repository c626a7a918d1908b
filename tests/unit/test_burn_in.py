"""Burn-in: a slot or a byte that is another one is found, and who had it is named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
import torch

from elastic_harness.commands import burn_in as command
from elastic_harness.errors import EXIT_INFRASTRUCTURE, EXIT_OTHER_BITS, EXIT_SUCCESS, ConfigError
from elastic_harness.gpt import burn_in
from elastic_harness.gpt.burn_in import SLOTS, Pattern
from elastic_harness.health.burn_in import BurnInReport, judge

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in, "CHUNK_BYTES", 64)


def told(compute: Callable[[int], str], name: str = "w0") -> BurnInReport:
    """What a worker tells of three rounds, as its lines have it."""
    pattern, ticks = Pattern(4, CPU), itertools.count()
    report = BurnInReport(name)
    report.include({"pid": 7, "device": "CPU 3", "torch": "2"})
    ask_the_time = 2 * SLOTS + 1  # so often in a round
    for found in burn_in.rounds(compute, pattern, 3 * ask_the_time - 1, clock=lambda: float(next(ticks))):
        report.include(json.loads(json.dumps(found)))
    return report


def sound(slot: int) -> str:
    return f"{slot:016x}"


def failing_once(at: int) -> Callable[[int], str]:
    """Another hash in one call."""
    calls = itertools.count()
    return lambda slot: "f" * 16 if next(calls) == at else sound(slot)


def test_equal_repetitions_are_no_finding() -> None:
    reports = [told(sound, "w0"), told(sound, "w1")]
    verdict = judge(reports)
    assert (verdict.wrong, verdict.broken, verdict.exit_code) == ((), (), EXIT_SUCCESS)
    assert verdict.hash == judge([told(sound)]).hash != judge([told(lambda slot: "0" * 16)]).hash
    assert (reports[0].rounds, len(reports[0].slot_s)) == (3, 3 * SLOTS)
    assert reports[0].slots_per_s() == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("at", range(SLOTS, 3 * SLOTS, 5))
def test_one_slot_that_came_out_otherwise_is_named(at: int) -> None:
    verdict = judge([told(sound, "w0"), told(failing_once(at), "w1")])
    number, slot = divmod(at, SLOTS)
    assert verdict.wrong == (
        f"w1 on CPU 3 computed 1 of 24 slots otherwise than the first time; slot {slot} in round {number} gave "
        f"{'f' * 16}, before {sound(slot)}",
    )
    assert verdict.exit_code == EXIT_OTHER_BITS


def test_a_worker_that_was_wrong_from_the_first_time_on_is_named_by_the_others() -> None:
    other = told(lambda slot: f"{slot + 1:016x}", "w2")
    verdict = judge([told(sound, "w0"), told(sound, "w1"), other])
    assert verdict.wrong == ("w2 on CPU 3 computed other bits than most workers, from its first round on",)
    verdict = judge([told(sound, "w0"), other])
    assert len(verdict.wrong) == 1 and "no majority agrees: w0 on CPU 3, w2 on CPU 3" in verdict.wrong[0]
    assert not verdict.hash and verdict.exit_code == EXIT_OTHER_BITS


def test_a_worker_that_died_is_named_and_what_it_had_told_counts() -> None:
    dead, unborn = told(sound, "w0"), BurnInReport("w1", ended="was ended by SIGKILL")
    dead.ended = "ended with exit code 1: MemoryError"
    verdict = judge([dead, unborn])
    assert verdict.broken == (
        "w0 on CPU 3 ended with exit code 1: MemoryError, after 3 rounds",
        "w1 on no device yet was ended by SIGKILL, after 0 rounds",
    )
    assert verdict.exit_code == EXIT_INFRASTRUCTURE and verdict.hash
    assert judge([unborn]).hash == ""


def test_every_bit_of_the_memory_is_written_both_ways() -> None:
    pattern = Pattern(4, CPU)
    pattern.write(0)
    first = pattern.chunks.clone()
    assert pattern.damage(0) is None and pattern.damage(1) == (4 * 64, 0)
    pattern.write(1)
    assert bool((first ^ pattern.chunks == 255).all())
    assert len({bytes(chunk.tolist()) for chunk in first}) == 4, "no two chunks are alike"


@pytest.mark.parametrize("place", [0, 63, 64, 200, 255])
def test_a_flipped_bit_in_memory_is_found_at_its_place(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Pattern(4, CPU)
    pattern.write(5)
    pattern.chunks.view(-1)[place] ^= 16
    assert pattern.damage(5) == (1, place)
    pattern.chunks.view(-1)[255] ^= 1
    assert pattern.damage(5) == (1 if place == 255 else 2, place)
    write = Pattern.write

    def forgets(self: Pattern, number: int) -> None:
        write(self, number)
        if number == 1:
            self.chunks.view(-1)[place] ^= 16

    monkeypatch.setattr(Pattern, "write", forgets)
    (sentence,) = judge([told(sound)]).wrong
    assert sentence == f"w0 on CPU 3 found memory changed in 1 of 3 rounds; 1 bytes in round 1, the first at {place}"


def test_slots_are_the_same_bits_each_time_and_differ_among_themselves() -> None:
    slots, again = burn_in.Slots(CPU), burn_in.Slots(CPU)
    hashes = [slots.compute(slot) for slot in range(3)]
    assert [again.compute(slot) for slot in (2, 0, 1)] == [hashes[2], hashes[0], hashes[1]]
    assert len(set(hashes)) == 3
    with torch.no_grad():
        next(again._model.parameters()).view(-1)[-1] += 1e-6
    assert again.compute(0) != hashes[0]


def test_workers_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda pid: {2, 5})
    assert command.devices(None) == ["2", "5"] and command.devices(3) == ["2", "5", "2"]
    monkeypatch.setattr(command.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert command.devices(None) == ["cuda:0"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--on", "0"], "--on is 0; it must be at least 1"),
        (["--minutes", "-1"], "--minutes is -1.0; it must be at least 0"),
        (["--steps", "3"], "name that run"),
        (["somewhere", "--memory", "3"], "--memory is for a test without RUN"),
    ],
)
def test_options_that_make_no_sense_are_said(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command.main(argv)


