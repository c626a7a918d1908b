"""Who is slow, and why, as pure functions of what members tell and of what Linux counts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.health.lasting import Turn
from elastic_harness.health.pace import Counters, PaceWatch, SlotTimes, Slowness, explain
from elastic_harness.machine_counters import read_counters

USUAL = SlotTimes(10_000, 1_000, 8_000, 500)
NOTHING = Counters(at_s=10.0, processors=4, major_faults=0, preempted=0)


def watched(
    owns: list[SlotTimes], others: list[list[SlotTimes]], steps: int = 20, counted: Counters = NOTHING
) -> list[Slowness]:
    watch, found = PaceWatch(1.5, steps, 0.0), []
    for second, (own, those) in enumerate(zip(owns, others, strict=True)):
        if watch.note(own, those, float(second)) is Turn.LASTS:
            found.append(watch.found(counted))
    return found


def slower(**parts: float) -> SlotTimes:
    """The usual work with so much more in these parts."""
    return SlotTimes(*(usual + parts.get(name, 0) for name, usual in USUAL._asdict().items()))


def test_a_slow_member_is_found_and_says_what_takes_it_longer() -> None:
    slow = slower(total=10_000, reading=9_000)
    found, = watched([USUAL] * 30 + [slow] * 30, [[USUAL] * 3] * 60)
    assert (found.times, found.others, found.cause.kind) == (2.0, 3, "data")
    assert found.cause.reason == "reading its samples takes 10.0 ms a slot, 1.0 on the others"
    assert found.evidence["slot_ms"]["reading"] == 10.0 and found.evidence["others_slot_ms"]["total"] == 10.0


def test_two_slow_ones_of_five_are_found_and_the_others_are_not() -> None:
    slow = slower(total=12_000, running=12_000)
    assert watched([slow] * 40, [[slow, USUAL, USUAL, USUAL]] * 40)
    assert not watched([USUAL] * 40, [[slow, slow, USUAL, USUAL]] * 40)


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(2, 8), st.floats(0.2, 1.6))
def test_uneven_samples_name_nobody(seed: int, members: int, sigma: float) -> None:
    """Short and long samples, a few in each step, dealt at random: as permutations of a dataset deal them."""
    rng = random.Random(seed)

    def one() -> SlotTimes:
        total = sum(rng.lognormvariate(9.0, sigma) for _ in range(4)) / 4
        return SlotTimes(total, 0.1 * total, 0.8 * total, 0.0)

    steps = [[one() for _ in range(members)] for _ in range(300)]
    for rank in range(members):
        assert not watched([step[rank] for step in steps], [step[:rank] + step[rank + 1 :] for step in steps])


@pytest.mark.parametrize(
    ("own", "counted", "kind"),
    [
        (slower(total=10_000, reading=10_000), {}, "data"),
        (slower(total=10_000, queued=9_000), {}, "cpu"),
        (slower(total=10_000, queued=9_000), {"throttled_s": 4.0}, "quota"),
        (slower(total=10_000, running=9_000), {"steal_s": 16.0}, "steal"),
        (slower(total=10_000), {}, "unknown"),
        (slower(total=10_000), {"disk_stall_s": 6.0}, "disk"),
        (slower(total=10_000), {"memory_stall_s": 6.0, "major_faults": 5_000}, "swapping"),
        (slower(total=10_000, reading=9_000), {"memory_stall_s": 6.0, "major_faults": 5_000}, "swapping"),
        (slower(total=10_000), {"memory_stall_s": 6.0, "major_faults": 2}, "unknown"),  # those of another process
        (slower(total=10_000, running=10_000), {}, "unknown"),
        (slower(total=10_000, running=10_000), {"hot": 3}, "clock"),
        (slower(total=10_000, running=10_000), {"hot": 0, "clock": 0.4}, "clock"),
        (slower(total=10_000, running=10_000), {"hot": 0, "clock": 0.98}, "unknown"),
        (slower(total=10_000, reading=3_000, queued=3_000, running=3_000), {}, "unknown"),
    ],
)
def test_a_cause_is_named_where_a_counter_shows_it(own: SlotTimes, counted: dict[str, float], kind: str) -> None:
    cause = explain(own, USUAL, replace(NOTHING, **counted))
    assert cause.kind == kind, cause
    assert (kind == "unknown") == ("no counter says" in cause.reason)


@given(st.builds(SlotTimes, *[st.floats(0, 1e7)] * 4), st.builds(SlotTimes, *[st.floats(0, 1e7)] * 4))
def test_what_the_others_have_as_well_is_no_cause(own: SlotTimes, usual: SlotTimes) -> None:
    """A member whose parts are all as usual is slow for a reason that nobody sees."""
    assert explain(usual, usual, NOTHING).kind == "unknown", "it takes no longer"
    own = own._replace(reading=usual.reading, running=usual.running, queued=usual.queued, total=usual.total + 1e8)
    assert explain(own, usual, NOTHING).kind == "unknown"


def test_counters_are_read_from_files_as_linux_writes_them(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    nothing = read_counters(tmp_path)
    assert nothing.steal_s is nothing.throttled_s is nothing.memory_stall_s is nothing.hot is nothing.clock is None
    write("proc/stat", "cpu  10 20 30 40 50 60 70 800 90 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=9\n")
    write("proc/pressure/io", "some avg10=0.58 avg60=3.29 avg300=2.71 total=264851784\nfull avg10=0.37 total=1\n")
    write("proc/self/cgroup", "0::/jobs/one\n")
    write("sys/fs/cgroup/cpu.stat", "usage_usec 9\nthrottled_usec 0\n")
    write("sys/fs/cgroup/jobs/cpu.stat", "nr_throttled 4\nthrottled_usec 3500000\n")
    for cpu in range(256):
        write(f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle/core_throttle_count", "2\n")
        write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", "900000\n")
        write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq", "3600000\n")
    read = read_counters(tmp_path)
    assert (read.steal_s, read.throttled_s, read.memory_stall_s) == (8.0, 3.5, 2.5)
    assert (read.disk_stall_s, read.hot, read.clock) == (pytest.approx(264.851784), 512, 0.25)
    write("proc/self/cgroup", "4:cpu,cpuacct:/one\n0::/\n")
    write("sys/fs/cgroup/cpu/one/cpu.stat", "nr_throttled 4\nthrottled_time 6000000000\n")
    assert read_counters(tmp_path).throttled_s == 6.0
    assert read.since(nothing).steal_s is None, "what could not be read before is not counted"
    assert read.since(read).hot == 0


def test_the_counters_of_this_machine_can_be_read() -> None:
    read = read_counters()
    assert read.processors >= 1 and read.since(read).at_s == 0.0
