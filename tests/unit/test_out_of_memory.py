"""Memory that runs out in a slot: the slot is computed again with the same bits, then by another worker."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import elastic_harness
from elastic_harness.comm.placement import Ranges, deal, merge_ranges
from elastic_harness.contract.board import SAMPLES_MAX, Board, BoardReader
from elastic_harness.contract.messages import TO_AGENT, TO_WORKER, SlotDeclined, SlotError
from elastic_harness.errors import Declined, OutOfMemory, UserCodeError
from elastic_harness.membership import protocol
from elastic_harness.membership.codec import decode, encode
from elastic_harness.membership.poison import Failure, blame
from elastic_harness.membership.protocol import (
    Announce,
    Lost,
    Pause,
    Poison,
    Publish,
    Ready,
    Reported,
    Scaled,
    SlotFailed,
    State,
    Tick,
    Trouble,
)
from elastic_harness.membership.types import Generation, Limits, Report, Source
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from elastic_harness.train import slots
from elastic_harness.train.batches import Shape
from elastic_harness.train.compute import DECLINES_MAX, given_up
from elastic_harness.train.gate import odd
from elastic_harness.train.gradients import HeldGradients
from elastic_harness.train.memory import is_out_of_memory, memory_now
from elastic_harness.train.progress import Progress
from unit.test_train_slots import Net, computer, run_unit

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (torch.cuda.OutOfMemoryError("the same class by its older name"), True),
        (RuntimeError(f"{CPU} 51200000 bytes. Error code 12 (Cannot allocate memory)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "Cannot allocate memory"), False),
        (ValueError("out of memory"), False),
        (UserCodeError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_which_errors_say_that_memory_ran_out(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_the_allocators_own_error_is_one() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value), raised.value


def test_how_full_it_is_can_be_told() -> None:
    told = memory_now()
    assert told["resident_bytes"] > 1 << 20
    assert all(0 < used <= limit for used, limit in told["pools"].values())


# ---- a slot is computed again


@settings(max_examples=40)
@given(
    slots=st.integers(1, 5),
    lanes=st.integers(1, 5),
    failing=st.integers(0, 4),
    where=st.sampled_from(["forward", "backward"]),
    function=st.booleans(),
)
def test_a_second_try_gives_the_same_bits(slots: int, lanes: int, failing: int, where: str, function: bool) -> None:
    """Forward changes the batch, the random state and the statistics of batch norm before it fails, backward most
    gradients."""
    shape, failing = Shape(slots, min(lanes, slots), 2), failing % slots
    undisturbed, model = Net(), Net()
    whole, again = computer(undisturbed, shape), computer(model, shape)
    armed: set[str] = set()

    def fail(place: str) -> None:
        if place in armed:
            armed.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")

    def loss_of(batch: Tensor) -> Tensor:
        batch.mul_(3.0)
        value = model(batch).pow(2).mean()
        fail("forward")
        return value

    model.first.weight.register_hook(lambda gradient: fail("backward"))  # the last of the backward
    armed.add(where)
    for unit in shape.units(range(shape.lanes)):
        for _, batch in whole.run(0, unit):
            whole.backward(undisturbed(batch.mul_(3.0)).pow(2).mean())
        expected = whole.take_gradients()
        fails = bool(armed) and failing in shape.unit_slots(unit)
        tries = list[int]()
        while not tries or tries[-1] == failing:
            try:
                for slot, batch in again.run(0, unit):
                    later, kept = slot != failing, armed.copy()
                    armed.difference_update(kept if later else ())
                    again.backward(partial(loss_of, batch) if function or where == "forward" else loss_of(batch))
                    armed.update(kept if later else ())
                tries.append(-1)
            except MemoryError:
                tries.append(again.slot)
                again.start_over()
        assert tries == ([failing, -1] if fails else [-1])
        got = again.take_gradients()
        assert expected[1] == got[1]
        for one, other in zip(expected[0], got[0], strict=True):
            assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


def trained(folder: Path, errors: list[BaseException], *, reads: bool = False) -> tuple[dict[str, Any], list[Any]]:
    """Train a model in this process, in which these errors are raised in slot 1 of step 1. Return the weights, and the
    events about slots."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = elastic_harness.Config.from_dict(
        {"training": {"max_steps": 3, "global_batch_samples": 8, "micro_batch_samples": 2}}
    )
    vectors = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))

    class Samples:
        def __len__(self) -> int:
            return len(vectors)

        def __getitem__(self, index: int) -> Tensor:
            if errors and reads and run.step == 1:
                raise errors.pop(0)
            return vectors[index]

    large: Tensor | None = None
    run = elastic_harness.start(model, optimizer, Samples(), config, run_dir=folder)
    with run:
        for step in run.steps():
            for slot, batch in enumerate(step.micro_batches()):

                if (step.index, slot) == (1, 1):
                    large = batch.clone()

                def loss(batch: Tensor = batch, is_it: bool = large is not None and large.equal(batch)) -> Tensor:
                    value = model(batch).pow(2).mean()
                    if errors and is_it and not reads:
                        raise errors.pop(0)
                    return value

                step.backward(loss)
    told = [e for e in read_events(folder / "events.jsonl") if e["event"].startswith("slot_")]
    return {name: value.clone() for name, value in model.state_dict().items()}, told


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, error: BaseException, reads: bool) -> None:
    undisturbed, _ = trained(tmp_path / "a", [])
    weights, told = trained(tmp_path / "b", [error], reads=reads)
    assert all(torch.equal(value, weights[name]) for name, value in undisturbed.items())
    assert verify(tmp_path / "b").ok
    (event,) = told
    assert (event["event"], event["step"]) == ("slot_retried", 1) and len(event["samples"]) == 2
    assert event["error"] == (str(error) or "MemoryError") and event["resident_bytes"] > 0


def test_an_error_that_is_not_about_memory_is_the_scripts_own(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        trained(tmp_path, [RuntimeError("shapes cannot be multiplied")])


def test_without_others_the_error_names_the_samples(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"memory for slot 1 of step 1: MemoryError; its samples are \[\d+, \d+\]"):
        trained(tmp_path, [MemoryError(), MemoryError()])


def test_on_a_gpu_the_third_try_keeps_on_the_host_what_backward_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed: the same hooks move the same tensors, here from host to host."""
    moved = []

    class Counted(slots.save_on_cpu):
        def __init__(self) -> None:
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda tensor: moved.append(tensor.numel()) or pack(tensor)

    monkeypatch.setattr(HeldGradients, "on_gpu", True)
    monkeypatch.setattr(slots, "save_on_cpu", Counted)
    undisturbed, _ = trained(tmp_path / "a", [])
    assert not moved
    weights, told = trained(tmp_path / "b", [MemoryError(), MemoryError()])
    assert all(torch.equal(value, weights[name]) for name, value in undisturbed.items())
    assert [event["spills"] for event in told] == [False, True] and moved
    with pytest.raises(OutOfMemory):
        trained(tmp_path / "c", [MemoryError(), MemoryError(), MemoryError()])


@pytest.mark.parametrize("given", [3.5, lambda: 3.5, None])
def test_what_is_no_loss_is_named(given: Any) -> None:
    alone = computer(Net(), Shape(1, 1, 2))
    with pytest.raises(UserCodeError, match=r"was given '(3.5|None)' for slot 0 of step 5; give the loss as a tensor"):
        for _ in alone.run(5, (0, 1)):
            alone.backward(given)


# ---- who ends, and who leaves a slot to others


def decided(progress: Progress, finished: int, *, alone: bool = False, slot: int = 5) -> type[Exception]:
    engine: Any = SimpleNamespace(
        batches=SimpleNamespace(shape=lambda step: Shape(8, 4, 1)),
        slots=SimpleNamespace(finished=finished),
        saver=SimpleNamespace(alone=alone),
    )
    return type(given_up(engine, progress, OutOfMemory(7, slot, (1, 2), "no memory")))


def test_a_worker_declines_a_slot_and_ends_if_it_can_do_none() -> None:
    assert decided(Progress(), 10) is Declined
    assert decided(Progress(), 10, alone=True) is OutOfMemory, "without a launcher nobody else is asked"
    progress = Progress().declining(2, 5, 10)
    assert decided(progress, 12, slot=4) is OutOfMemory, "the same lane again: nobody else is left"
    for _ in range(DECLINES_MAX - 1):
        assert decided(progress, 10, slot=0) is Declined
        progress = progress.declining(0, 0, 10)
    assert decided(progress, 10, slot=2) is OutOfMemory, "it is not the slots that are too large"
    assert decided(progress, 11, slot=2) is Declined, "it has finished one since"
    later = progress.at(8, record=None, metrics=None)
    assert decided(later, 10) is OutOfMemory and later.declined == (), "also from step to step"


@given(st.data(), st.integers(1, 10), st.integers(1, 5))
def test_lanes_go_to_members_that_have_not_declined_them(data: st.DataObject, lanes: int, world: int) -> None:
    members = [f"m{i}" for i in range(world)]
    numbers = st.sets(st.integers(0, lanes - 1))
    declined = data.draw(st.dictionaries(st.sampled_from(members), numbers))
    done = sorted(data.draw(numbers))
    held: dict[str, Ranges] = {members[-1]: merge_ranges(*(((lane, lane + 1),) for lane in done))} if done else {}
    load = data.draw(st.dictionaries(st.sampled_from(members), st.integers(0, 3)))
    dealt = deal(lanes, members, held, load, declined)
    flat = {member: [lane for lo, hi in ranges for lane in range(lo, hi)] for member, ranges in dealt.items()}
    missing = [lane for lane in range(lanes) if lane not in done]
    assert sorted(lane for own in flat.values() for lane in own) == missing, "each lane once"
    for member, own in flat.items():
        for lane in own:
            everyone = all(lane in declined.get(other, ()) for other in members)
            assert everyone or lane not in declined.get(member, ()), (member, lane)
    assert deal(lanes, members, held, load, {}) == deal(lanes, members, held, load)


def test_a_word_that_is_missing_compares_nothing() -> None:
    assert odd([0, 5, 5, 6], 0) == ((3,), 5), "the reference could not compute its canary"
    assert odd([5, 0, 5], 0) == ((), 5)


# ---- the leader


def run(state: State, *happened: protocol.Event, now: float = 0.0) -> tuple[State, list[Any]]:
    actions: list[Any] = []
    for event in happened:
        state, more = protocol.step(state, event, now)
        actions += more
    return state, actions


def declining(*who: str, members: tuple[str, ...] = ("a", "b"), target: int = 2) -> tuple[State, list[Any]]:
    """A formed generation at version 3, in which these members have then declined slot 6, in lane 3."""
    state, _ = run(State(Limits(1, 8, target)), *map(Ready, members))
    if state.generation is None:
        state, _ = run(state, Tick(), now=700.0)  # the others did not come in time
    state, _ = run(state, *(Reported(m, Report(1, 3)) for m in members))
    state, _ = run(state, *(Trouble(m, 1, holds=True, why="slot 6 is another worker's") for m in who), now=700.0)
    state, actions = run(state, Tick(), now=701.0)
    (announced,) = actions
    assert isinstance(announced, Announce) and announced.generation.urgent
    assert announced.generation == Generation(2, members, True, "slot 6 is another worker's")
    reports = [Report(2, 3, declined=((3, 6),) if m in who else ()) for m in members]
    return run(state, *map(Reported, members, reports), now=701.0)


def test_another_member_is_dealt_the_lane() -> None:
    state, (publish,) = declining("a")
    assert isinstance(publish, Publish) and state.formed
    assert publish.digest.declined == (("a", (3,)),)
    assert publish.digest.sources == {"a": Source("keep"), "b": Source("keep")}, "nobody has to begin again"


def test_a_slot_that_all_have_declined_stops_the_run() -> None:
    state, actions = declining("a", "b")
    assert actions == [Poison(3, 6, ("a", "b"), "there was not enough memory for it")] and state.done


def test_a_worker_without_others_is_told_to_try_again() -> None:
    _, (publish,) = declining("a", members=("a",), target=1)
    assert isinstance(publish, Publish) and publish.digest.declined == (("a", (3,)),)


def test_if_workers_are_missing_the_others_wait_for_them() -> None:
    state, (pause,) = declining("a", members=("a",))
    assert isinstance(pause, Pause) and "has the memory for a slot" in pause.reason
    assert run(state, Tick(), now=900.0)[1] == [], "it is said once"
    joined, (announce,) = run(state, Ready("b"))
    assert announce.generation.members == ("a", "b") and announce.generation.urgent
    reports = [Reported("a", Report(3, 3, declined=((3, 6),))), Reported("b", Report(3, -1))]
    joined, (publish,) = run(joined, *reports)
    assert publish.digest.declined == (("a", (3,)),) and publish.digest.sources["b"] == Source("state", "a")
    assert joined.unable == ()


def test_they_do_not_wait_for_workers_that_will_never_come() -> None:
    state, _ = declining("a", "b", members=("a", "b"), target=3)
    state, actions = run(state, Scaled(2))
    assert [type(a) for a in actions] == [Announce]
    _, actions = run(state, *(Reported(m, Report(3, 3, declined=((3, 6),))) for m in ("a", "b")))
    assert [type(a) for a in actions] == [Poison]


def test_who_waited_is_forgotten_when_it_is_gone() -> None:
    state, _ = declining("a", members=("a",))
    state, actions = run(state, Lost("a"))
    assert [type(a) for a in actions] == [Pause] and "no worker is ready" in actions[0].reason
    _, (announce,) = run(state, Ready("a2"))
    assert announce.generation.members == ("a2",), "another worker may have the memory, also alone"


def test_only_slots_of_the_step_that_is_done_next_count() -> None:
    state, _ = run(State(Limits(1, 8, 2)), Ready("a"), Ready("b"))
    _, (publish,) = run(
        state, Reported("a", Report(1, 3, record=2)), Reported("b", Report(1, 2, declined=((3, 6),)))
    )
    assert isinstance(publish, Publish) and publish.digest.declined == ()


# ---- whom the kernel ends


def test_a_slot_for_which_two_members_had_no_memory_is_blamed() -> None:
    failures: list[Failure] = [(4, 7, "a", "memory"), (4, 7, "a", "memory")]
    assert blame(failures, 4, 7, 0.0)[0] == (), "one member is one, however often it is told of"
    failures += [(4, 7, "b", "memory")]
    members, reason = blame(failures, 4, 7, 0.0)
    assert members == ("a", "b") and reason == "there was not enough memory for it"
    failures += [(4, 2, "c", "memory")]
    assert blame(failures, 4, 7, 0.0)[0] == (), "a machine that is full ends workers in any slot"
    failures += [(4, 7, "d", "memory")]
    assert blame(failures, 4, 7, 0.0)[0] == ("a", "b", "d")


def test_kills_for_memory_and_other_kills_are_not_added_up() -> None:
    failures: list[Failure] = [(4, 7, "a", "memory"), (4, 7, "b", "killed"), (4, 7, "c", "overdue")]
    assert blame(failures, 4, 7, 9.0)[0] == ()


def test_the_board_names_the_samples_of_a_slot_after_the_worker_is_gone() -> None:
    reader = BoardReader("w0-1")
    board = Board(os.dup(reader.descriptor))
    assert reader.samples(0, 0) == ()
    board.show_samples(4, 7, [3, 1 << 40, 2])
    assert reader.samples(4, 7) == (3, 1 << 40, 2) and reader.samples(4, 6) == reader.samples(3, 7) == ()
    board.show_samples(5, 0, list(range(1000)))
    assert reader.samples(5, 0) == tuple(range(SAMPLES_MAX))
    board.show_samples(5, 1, [])
    assert reader.samples(5, 1) == ()
    reader.close()


def test_what_is_told_survives_the_wire() -> None:
    report = Report(2, 3, declined=((3, 6), (4, 9)))
    state, (publish,) = declining("a")
    for value in (report, publish.digest, state, SlotFailed("a", 1, 2, "memory"), Trouble("a", 1, why="so")):
        assert decode(encode(value)) == value
    for message in (report, SlotDeclined(1, 2, 3, "no memory", (4, 5)), SlotError(1, 2, "x", out_of_memory=True)):
        assert TO_AGENT.unpack(TO_AGENT.pack(message)) == message
    assert TO_WORKER.unpack(TO_WORKER.pack(publish.digest)) == publish.digest
    assert "declined" not in TO_AGENT.pack(Report(2, 3)), "nothing is told while there is nothing to tell"


def test_a_model_without_memory_leaves_no_gradient_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    slots = computer(model, Shape(2, 1, 2))
    model[0].weight.register_hook(lambda gradient: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        run_unit(slots, model, 0, (0, 1))
    assert model[1].weight.grad is not None, "the backward was half done"
    slots.start_over()
    assert all(parameter.grad is None for parameter in model.parameters())
