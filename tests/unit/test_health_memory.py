"""The forecast of memory as a pure function of readings, and the readings from files as Linux writes them."""

from __future__ import annotations

import random
import resource
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness import memory_pools
from elastic_harness.health.faults import Severity
from elastic_harness.health.memory import (
    GIB,
    LEAST,
    REACH,
    WINDOW,
    MemoryReading,
    MemoryWatch,
    judge,
    seconds_until_full,
)
from elastic_harness.memory_pools import read_pools

MIB = 1 << 20
LIMIT = 1000 * MIB


def readings(used: list[float], limit: int = LIMIT, every_s: float = 5.0) -> list[MemoryReading]:
    return [MemoryReading(index * every_s, "the pool", int(each), limit) for index, each in enumerate(used)]


@given(st.integers(LEAST, WINDOW), st.integers(1, 50), st.integers(0, 500), st.floats(0.1, 60))
def test_a_straight_line_is_continued(count: int, rate_mib: int, start_mib: int, every_s: float) -> None:
    used = [(start_mib + index * rate_mib) * MIB for index in range(count)]
    limit = used[-1] + 3 * (count - 1) * rate_mib * MIB
    left_s = seconds_until_full(readings(used, limit, every_s))
    assert left_s == pytest.approx(3 * (count - 1) * every_s)


@given(st.lists(st.integers(0, 900), min_size=LEAST, max_size=WINDOW))
def test_without_growth_there_is_no_forecast(falling: list[int]) -> None:
    assert seconds_until_full(readings([each * MIB for each in sorted(falling, reverse=True)])) is None


@given(st.integers(LEAST, WINDOW), st.floats(0.1, 0.9), st.integers(1, 900), st.integers(0, 10))
def test_one_jump_is_no_trend(count: int, at: float, jump_mib: int, noise_mib: int) -> None:
    """A second model, or a cache that fills at once; there is noise around it."""
    rng = random.Random(count)
    used = [(100 + (index >= at * count) * jump_mib + rng.randint(0, noise_mib)) * MIB for index in range(count)]
    assert seconds_until_full(readings(used, 2 * LIMIT)) is None


@given(st.integers(2, 12), st.integers(10, 400), st.integers(0, 11))
def test_a_sawtooth_is_no_trend(period: int, height_mib: int, phase: int) -> None:
    """Garbage that is collected now and then."""
    used = [(100 + (index + phase) % period * height_mib / period) * MIB for index in range(WINDOW)]
    assert seconds_until_full(readings(used)) is None


@given(st.integers(0, 20))
def test_growth_that_has_ended_is_none(noise_mib: int) -> None:
    """The first steps fill the allocator's caches."""
    rng = random.Random(noise_mib)
    used = [(100 + min(index, WINDOW // 2) * 20 + rng.uniform(0, noise_mib)) * MIB for index in range(WINDOW)]
    assert seconds_until_full(readings(used)) is None


@given(st.integers(0, 2**32), st.floats(0, 8))
def test_noise_does_not_hide_a_leak(seed: int, noise_mib: float) -> None:
    rng = random.Random(seed)
    used = [(100 + 5 * index + rng.uniform(0, noise_mib)) * MIB for index in range(WINDOW)]
    left_s = seconds_until_full(readings(used))
    exact_s = (LIMIT - used[-1]) / (5 * MIB) * 5.0
    assert left_s == pytest.approx(exact_s, rel=0.2)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=WINDOW), st.integers(1, 4000))
def test_a_forecast_reaches_so_far_only_as_its_readings_and_never_below_zero(used: list[int], limit_mib: int) -> None:
    seen = readings([each * MIB for each in used], limit_mib * MIB)
    left_s = seconds_until_full(seen)
    assert left_s is None or (len(used) >= LEAST and 0 <= left_s <= REACH * (seen[-1].at_s - seen[0].at_s))


def test_a_verdict_says_what_is_full_and_when() -> None:
    full = judge(readings([950 * MIB]), 0.95, 600)
    assert full is not None and full.severity is Severity.CRITICAL
    assert full.message.startswith("the pool holds 0.93 of 0.98 GiB, 95.0%; use less, or raise")
    assert judge(readings([949 * MIB]), 0.95, 600) is None
    growing = readings([(600 + 5 * index) * MIB for index in range(32)])
    soon = judge(growing, 0.95, 600)
    assert soon is not None and soon.severity is Severity.WARNING and soon.evidence["full_in_s"] == 245.0
    assert "full in 245 s, as the last 155 s went" in soon.message
    assert judge(growing, 0.95, 200) is None, "that is later than anybody wants to know"


def test_a_pool_is_told_once_a_window_and_again_when_it_gets_worse() -> None:
    used = [600 + 5 * min(index, 78) for index in range(4 * WINDOW)]
    watch = MemoryWatch(0.95, 600)
    told = [
        (index, verdict.severity)
        for index, reading in enumerate(readings([each * MIB for each in used]))
        for verdict in watch.judge([reading])
    ]
    warnings = [index for index, severity in told if severity is Severity.WARNING]
    criticals = [index for index, severity in told if severity is Severity.CRITICAL]
    assert len(warnings) == 1 and 16 <= warnings[0] < 60
    assert criticals[0] == 70 and all(b - a == WINDOW for a, b in pairwise(criticals))


def test_what_was_freed_and_fills_again_is_told_again() -> None:
    """A worker is ended for memory, and its successor fills it too."""
    used = [900, 960, 960, 870, 960, 850, 960]
    watch = MemoryWatch(0.95, 0)
    told = [bool(list(watch.judge([each]))) for each in readings([each * MIB for each in used])]
    assert told == [False, True, False, False, False, False, True]


# ---- readings


def files(folder: Path, **content: str) -> Path:
    for name, text in content.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    4194304 kB\nHugePages_Total:       0\n"


def test_a_cgroup_and_those_around_it_are_read_without_page_cache(tmp_path: Path) -> None:
    proc = files(tmp_path / "proc", meminfo=MEMINFO, self__cgroup="0::/jobs/one\n")
    cgroups = files(
        tmp_path / "cgroups",
        **{
            "jobs__memory.max": f"{4 * GIB}\n",
            "jobs__memory.current": f"{3 * GIB}\n",
            "jobs__memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}\n",
            "jobs__one__memory.max": "max\n",
            "jobs__one__memory.current": f"{GIB}\n",
        },
    )
    machine, group = read_pools(7.0, proc, cgroups)
    assert machine == MemoryReading(7.0, "the machine's memory", 12 * GIB, 16 * GIB)
    assert group == MemoryReading(7.0, "the memory of cgroup /jobs", 3 * GIB - GIB - GIB // 2, 4 * GIB)


def test_version_1_of_cgroups_is_read_and_a_path_that_is_not_visible_is_the_root(tmp_path: Path) -> None:
    proc = files(tmp_path / "proc", meminfo=MEMINFO, self__cgroup="5:cpu:/\n4:memory:/docker/ab12\n0::/\n")
    cgroups = files(
        tmp_path / "cgroups",
        **{
            "memory__memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory__memory.usage_in_bytes": f"{GIB}\n",
            "memory__memory.stat": f"total_inactive_file {GIB // 4}\ntotal_active_file 0\n",
        },
    )
    (group,) = [each for each in read_pools(0.0, proc, cgroups) if "cgroup" in each.pool]
    assert group == MemoryReading(0.0, "the memory of cgroup /", 3 * GIB // 4, 2 * GIB)
    (cgroups / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert [each for each in read_pools(0.0, proc, cgroups) if "cgroup" in each.pool] == [], "that is no limit"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_pools(0.0, tmp_path, tmp_path) == []


def test_this_machine_can_be_read() -> None:
    machine = read_pools(0.0)[0]
    assert machine.pool == "the machine's memory" and 0 < machine.used_bytes < machine.limit_bytes
    assert memory_pools.resident_bytes() % resource.getpagesize() == 0 and memory_pools.resident_bytes() > 1 << 20
