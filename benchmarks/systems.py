"""The three systems under test behind one face: start, who can be killed, what was committed when, stop.

A commit row is {t, step, world_size, ...}; `t` is unix seconds and `step` counts committed steps from 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common import (
    RIVALS_VENV,
    BenchmarkError,
    JsonLines,
    child,
    elastic_harness_argv,
    end,
    environment,
    tail,
    wait_for,
)
from elastic_harness.agent.control.server import request
from elastic_harness.contract.commands import GetStatus

START_TIMEOUT_S = 120.0
BUILTIN_TRAINER = ("-m", "elastic_harness.train")


class Committing(Protocol):
    """What can be waited for."""

    name: str
    workers: int
    commits: list[dict[str, Any]]

    def poll(self) -> None:
        """Read new commit rows."""

    def healthy(self) -> None:
        """BenchmarkError if the system as a whole has ended."""


class System(Committing, Protocol):
    """What the measuring loop needs to know of a system."""

    settings: dict[str, Any]

    def start(self) -> None: ...
    def victims(self) -> list[int]:
        """The process ids of the workers that take part now."""

    def full_size_at(self, t_kill: float) -> dict[str, float | None]:
        """When all workers took part again after a kill at t_kill, as far as it has happened."""

    def redone(self, t_kill: float, highest: int) -> int:
        """How many committed steps were computed once more after the kill."""

    def stop(self) -> None: ...


def rival_environment(folder: Path, commits: Path, config: Path, overrides: Sequence[str]) -> dict[str, str]:
    """What the rivals' workers find in their environment; `commits`: the log of commits they append to."""
    return environment(
        BENCH_FOLDER=str(folder),
        BENCH_COMMITS=str(commits),
        BENCH_CONFIG=str(config),
        BENCH_OVERRIDES=" ".join(overrides),
    )


class _Rival:
    """Shared by the rivals: a folder, the environment of the workers, the log of commits they append to."""

    name = "rival"

    def __init__(self, folder: Path, workers: int, config: Path, overrides: Sequence[str] = ()) -> None:
        self.folder, self.workers = folder, workers
        folder.mkdir(parents=True, exist_ok=True)
        self._log = JsonLines(folder / "commits.jsonl")
        self.commits = self._log.rows
        self._pids_before: set[int] = set()
        self.settings: dict[str, Any] = {}
        self.environment = rival_environment(folder, self._log.path, config, overrides)
        self._stack = contextlib.ExitStack()

    def poll(self) -> None:
        self._log.poll()

    def victims(self) -> list[int]:
        """Workers that committed the newest step and live."""
        if not self.commits:
            return []
        newest = max(row["step"] for row in self.commits[-4 * self.workers :])
        pids = {row["pid"] for row in self.commits[-4 * self.workers :] if row["step"] >= newest - 1}
        return sorted(pid for pid in pids if _alive(pid))

    def note_kill(self) -> None:
        self._pids_before = {row["pid"] for row in self.commits}

    def full_size_at(self, t_kill: float) -> dict[str, float | None]:
        rows = [r for r in self.commits if r["t"] > t_kill and r["world_size"] == self.workers]
        new = [r["t"] for r in rows if r["pid"] not in self._pids_before]
        return {"commit": min(new) if new else None}

    def redone(self, t_kill: float, highest: int) -> int:
        """Steps that the replacements of killed workers committed although they had been committed before."""
        rows = [r for r in self.commits if r["t"] > t_kill and r["pid"] not in self._pids_before]
        return len({r["step"] for r in rows if r["step"] <= highest})

    def stop(self) -> None:
        self._stack.close()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def torchft_settings(min_replicas: int) -> dict[str, Any]:
    """The quickest that work: lighthouse, flat allreduce, synchronous quorum."""
    lighthouse = ["--min_replicas", str(min_replicas), "--heartbeat_timeout_ms", "500"]
    return {
        "lighthouse": [*lighthouse, "--join_timeout_ms", "5000", "--quorum_tick_ms", "10"],
        "gloo_timeout_s": 1,
        "allreduce": "Manager.allreduce of one flat gradient",
        "use_async_quorum": False,
        "split": "samples over participating_rank / num_participants",
        "heartbeat_interval_ms": 100,
        "min_replica_size": min_replicas,
    }


def torchrun_settings(*arguments: str) -> dict[str, Any]:
    """Restarted at once and as often as it takes; without sharing its store it hardly ever comes back."""
    return {
        "environment": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        "arguments": [*arguments, "--max-restarts", "1000"],
        "checkpoint_interval_steps": 10,
        "checkpoint": "torch.save to a temporary name, os.replace",
        "training": "DistributedDataParallel, no_sync accumulation",
    }


class Torchft(_Rival):
    """torchft tuned: quick lighthouse, flat allreduce, synchronous quorum, workers restarted at once."""

    name = "torchft"

    def __init__(self, folder: Path, workers: int, config: Path, overrides: Sequence[str] = ()) -> None:
        super().__init__(folder, workers, config, overrides)
        self.settings = torchft_settings(max(1, workers // 2))
        self.settings["restart"] = "a supervisor thread for each worker restarts it as soon as it ends"
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.restarts = 0

    def start(self) -> None:
        port = free_port()
        lighthouse = [str(RIVALS_VENV / "bin" / "torchft_lighthouse"), "--bind", f"[::]:{port}"]
        self._lighthouse = self._stack.enter_context(
            child([*lighthouse, *self.settings["lighthouse"]], self.folder / "lighthouse.log", self.environment)
        )
        self._stack.callback(self._end_workers)
        self.environment |= {
            "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
            "BENCH_TORCHFT": json.dumps(self.settings),
        }
        for index in range(self.workers):
            thread = threading.Thread(target=self._supervise, args=(index,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _supervise(self, index: int) -> None:
        log = self.folder / f"worker-{index}.log"
        while not self._closing.is_set():
            with log.open("ab") as sink:
                process = subprocess.Popen(
                    [str(RIVALS_VENV / "bin" / "python"), "-m", "benchmarks.rivals.torchft_worker"],
                    env={**self.environment, "BENCH_WORKER": str(index)},
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                    start_new_session=True, cwd=self.folder,
                )  # fmt: skip
            self._running[index] = process
            process.wait()
            self.restarts += 1

    def _end_workers(self) -> None:
        self._closing.set()
        deadline = time.monotonic() + 10
        while any(t.is_alive() for t in self._threads) and time.monotonic() < deadline:
            for process in list(self._running.values()):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            time.sleep(0.02)

    def healthy(self) -> None:
        if self._lighthouse.poll() is not None:
            raise BenchmarkError(f"torchft's lighthouse ended:\n{tail(self.folder / 'lighthouse.log')}")
        if self.restarts > 500:
            raise BenchmarkError(f"torchft's workers end at once:\n{tail(self.folder / 'worker-0.log')}")


class Torchrun(_Rival):
    """torchrun: all workers restarted at each failure, from a checkpoint written every 10 steps."""

    name = "torchrun"

    def __init__(self, folder: Path, workers: int, config: Path, overrides: Sequence[str] = ()) -> None:
        super().__init__(folder, workers, config, overrides)
        self.settings = torchrun_settings("--standalone", "--nproc-per-node", str(workers))

    def start(self) -> None:
        argv = [str(RIVALS_VENV / "bin" / "torchrun"), *self.settings["arguments"]]
        env = self.environment | self.settings["environment"] | {"BENCH_TORCHRUN": json.dumps(self.settings)}
        self._process = self._stack.enter_context(
            child([*argv, "-m", "benchmarks.rivals.torchrun_worker"], self.folder / "torchrun.log", env)
        )
        self._stack.callback(self._end_workers)

    def _end_workers(self) -> None:
        """torchrun puts its workers into sessions of their own: end those that its end left behind."""
        end(self._process)
        for pid in {row["pid"] for row in self.commits}:
            if _alive(pid) and "torchrun_worker" in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def healthy(self) -> None:
        if self._process.poll() is not None:
            raise BenchmarkError(
                f"torchrun ended with {self._process.returncode}:\n{tail(self.folder / 'torchrun.log')}"
            )


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Ours:
    """elastic-harness through its public command line, seen through events.jsonl alone."""

    name = "ours"

    def __init__(
        self,
        folder: Path,
        workers: int,
        config: Path,
        overrides: Sequence[str] = (),
        spares: int = 1,
        program: Sequence[str] = BUILTIN_TRAINER,
        name: str = "ours",
        options: Sequence[str] = (),
    ) -> None:
        self.folder, self.workers, self.name, self.spares = folder, workers, name, spares
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = folder / "run"
        self.settings: dict[str, Any] = {
            "arguments": ["launch", "--standalone", f"--nproc-per-node={workers}", f"--spares={spares}", *options],
            "program": [*program, "--config", config.name, *overrides],
        }
        self._argv = [
            *elastic_harness_argv(), *self.settings["arguments"], f"--run-dir={self.run_dir}",
            *program, "--config", str(config), *overrides,
        ]  # fmt: skip
        self.events = JsonLines(self.run_dir / "events.jsonl")
        self.commits: list[dict[str, Any]] = []
        self._pid_of: dict[str, int] = {}
        self._members: list[str] = []
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        self.process = self._stack.enter_context(child(self._argv, self.folder / "launch.log"))

    def poll(self) -> None:
        for row in self.events.poll():
            if row["event"] == "step_committed":
                self.commits.append(row)
            elif row["event"] == "worker_started":
                self._pid_of[row["member"]] = row["pid"]
            elif row["event"] == "generation":
                self._members = row["members"]

    def victims(self) -> list[int]:
        """The members of the newest generation that live."""
        pids = [self._pid_of[m] for m in self._members if m in self._pid_of]
        return [pid for pid in pids if _alive(pid)]

    def warm_spares(self) -> int:
        """Living workers outside the group that have loaded everything and wait for a place."""
        record = json.loads((self.run_dir / "run.json").read_text())
        status = request(record["control"], GetStatus())
        waiting = [w for w in status["workers"] if w["member"] not in status["members"] and not w["leaving"]]
        return sum(w["state"] != "starting" for w in waiting)

    def note_kill(self) -> None:
        self._members_before = set(self._members)

    def full_size_at(self, t_kill: float) -> dict[str, float | None]:
        """The generation of full size with a new member, and the first commit in it."""
        for row in self.events.rows:
            if row["event"] == "generation" and row["t"] > t_kill and len(row["members"]) == self.workers:
                if set(row["members"]) - self._members_before:
                    number = row["number"]
                    later = [c["t"] for c in self.commits if c["t"] > t_kill and c["generation"] >= number]
                    joined = [
                        e["t"] for e in self.events.rows
                        if e["event"] == "worker_joined" and e["t"] > t_kill and e["generation"] >= number
                    ]  # fmt: skip
                    return {
                        "generation": row["t"],
                        "joined": min(joined) if joined else None,
                        "commit": min(later) if later else None,
                    }
        return {"generation": None, "joined": None, "commit": None}

    def redone(self, t_kill: float, highest: int) -> int:
        """Steps reported as committed both before and after the kill."""
        before = {r["step"] for r in self.commits if r["t"] <= t_kill}
        return len({r["step"] for r in self.commits if r["t"] > t_kill and r["step"] in before})

    def between(self, event: str, t_low: float, t_high: float) -> list[dict[str, Any]]:
        """The events of one kind in a stretch of time."""
        return [e for e in self.events.rows if e["event"] == event and t_low < e["t"] <= t_high]

    def healthy(self) -> None:
        if self.process.poll() is not None:
            raise BenchmarkError(
                f"elastic-harness ended with {self.process.returncode}:\n{tail(self.folder / 'launch.log')}"
            )

    def stop(self) -> None:
        self._stack.close()


def rivals_available() -> str | None:
    """None if the rivals' environment is there, else the reason why not (it is built on demand)."""
    script = Path(__file__).resolve().parent / "rivals_env.sh"
    environment_ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([str(script)], capture_output=True, text=True, env=environment_, check=False)
    if done.returncode != 0:
        return f"rivals_env.sh failed with {done.returncode}: {done.stderr.strip()[-600:]}"
    return None


def rival_versions() -> dict[str, str]:
    """The versions that the rivals' environment really holds."""
    code = "import importlib.metadata as m, json\nprint(json.dumps({p: m.version(p) for p in ('torch', 'torchft')}))"
    done = subprocess.run(
        [str(RIVALS_VENV / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False
    )
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"error": done.stderr.strip()[-200:]}


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def wait_started(system: Committing, commits: int) -> None:
    """Until the system has committed a few steps at full size."""

    def settled() -> bool | None:
        system.poll()
        system.healthy()
        at_full = [row for row in system.commits[-200:] if row["world_size"] == system.workers]
        return len({row["step"] for row in at_full}) >= commits or None

    wait_for(f"{system.name} to commit {commits} steps at full size", settled, START_TIMEOUT_S)
