"""Two systems of equal workers side by side, taking turns at a gate, for throughput.py and memory.py."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import HERE, BenchmarkError, child, elastic_harness_argv, environment, tail
from benchmarks.gate import VARIABLE, Driver

START_TIMEOUT_S = 180.0
# a worker that waits at the gate makes no progress, which must not count as a hang
PATIENT = (
    "elastic.progress_timeout_min_s=250", "elastic.progress_timeout_max_s=300", "training.max_steps=1000000",
    "checkpoint.checkpoint_interval=0",
    "checkpoint.memory_snapshot_interval=0",
)  # fmt: skip


def ddp_environments(workers: int, **extra: str) -> list[dict[str, str]]:
    """The environment of each rank of a plain torch.distributed job on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}
    return [environment(RANK=str(r), LOCAL_RANK=str(r), **rendezvous, **extra) for r in range(workers)]


@contextlib.contextmanager
def side_by_side(
    folder: Path,
    workers: int,
    config: Path,
    overrides: Sequence[str],
    systems: Sequence[str] = ("ours", "ddp"),
) -> Iterator[tuple[Driver, dict[str, list[subprocess.Popen[bytes]]]]]:
    """Start the systems, wait until all their workers are at the gate, end them afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gate"
    driver = Driver(path)
    gate = {VARIABLE: str(path)}
    processes: dict[str, list[subprocess.Popen[bytes]]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(driver.close)
        if "ours" in systems:
            launch = [
                *elastic_harness_argv(),
                "launch", "--standalone", f"--nproc-per-node={workers}", "--spares=0",
                f"--run-dir={folder / 'run'}", str(HERE / "harness_worker.py"),
                "--config", str(config), *PATIENT, *overrides,
            ]  # fmt: skip
            processes["ours"] = [stack.enter_context(child(launch, folder / "ours.log", environment(**gate)))]
        if "ddp" in systems:
            argv = [
                sys.executable,
                "-m",
                "benchmarks.ddp_worker",
                "--config",
                str(config),
                *PATIENT,
                *overrides,
            ]
            processes["ddp"] = [
                stack.enter_context(child(argv, folder / f"ddp-{env['RANK']}.log", env))
                for env in ddp_environments(workers, **gate)
            ]

        def check() -> None:
            for name, group in processes.items():
                for process in group:
                    if process.poll() is not None:
                        log = folder / ("ours.log" if name == "ours" else "ddp-0.log")
                        raise BenchmarkError(f"{name} ended with {process.returncode} at its start:\n{tail(log)}")

        driver.admit(dict.fromkeys(processes, workers), START_TIMEOUT_S, check)
        yield driver, processes


def cpu_seconds(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """CPU time used so far by these processes and all their living descendants."""
    parents: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
                used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / tick
    total, queue = 0.0, [p.pid for p in processes]
    while queue:
        pid = queue.pop()
        total += used.get(pid, 0.0)
        queue.extend(parents.get(pid, ()))
    return total
