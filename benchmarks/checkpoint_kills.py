"""SIGKILL at hundreds of moments of saving: is a bad checkpoint ever visible, is a good one ever lost?

    python -m benchmarks.checkpoint_kills [--moments 240]

Two processes copy their shares of each state into shared memory, the real writer takes it to disk and to an S3 server
(moto). One of them is killed at a named place, when it passes it for the n-th time; then everything that is visible is
read and compared with what was saved, a new writer finishes, and that is compared once more. The last moments kill the
agent of a real job (`elastic-harness launch`) at random times. The JSON has the count of every phase.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import s3_server
from benchmarks.common import finish, say
from elastic_harness import failpoints
from elastic_harness.checkpoint import tiers
from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest
from elastic_harness.checkpoint.disk.retention import Retention
from elastic_harness.checkpoint.layout import Slice
from elastic_harness.checkpoint.memory.snapshot import Frames, SnapshotOutcome
from elastic_harness.checkpoint.policy import Policy, Upload
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.checkpoint.tensors import slice_of
from elastic_harness.contract import shared_frames
from elastic_harness.errors import CheckpointCorrupt
from elastic_harness.runs.events import read_events

PHASES: dict[str, tuple[str, ...]] = {
    "copy": ("checkpoint.begun", "checkpoint.copying", "checkpoint.copied"),
    "hash": ("checkpoint.hashing", "checkpoint.sealed"),
    "write": ("checkpoint.writing",),
    "fsync": ("checkpoint.syncing", "checkpoint.described"),
    "rename": ("checkpoint.renaming", "checkpoint.written"),
    "retention": ("checkpoint.pruning", "checkpoint.pruned"),
    "upload": ("checkpoint.uploading", "checkpoint.uploaded"),
}
MOST_HITS = {  # how often a place is passed, about: by one copier, or by a writer in one trial
    "checkpoint.begun": 1, "checkpoint.copying": 3, "checkpoint.copied": 1, "checkpoint.hashing": 14,
    "checkpoint.writing": 9, "checkpoint.pruning": 2, "checkpoint.pruned": 3,
}  # fmt: skip
KEEP = 2
SAVES = 4  # in one trial
FROZEN, TRAINED = 6_000_000, 9_000_000  # elements: 24 and 36 MB, five pieces
AGENT_KILLS = 8


def state_at(version: int) -> dict[Slice, torch.Tensor]:
    tensors = {
        "frozen": torch.arange(FROZEN, dtype=torch.float32),
        "trained": torch.full((TRAINED,), float(version)),
        "step": torch.tensor(version),
    }
    return {slice_of(name, tensor): tensor for name, tensor in tensors.items()}


@dataclass
class Trial:
    """One kill, and what was known to be safe before it."""

    folder: Path
    url: str | None
    descriptors: list[int] = field(default_factory=shared_frames.create)
    wake: int = field(default_factory=shared_frames.wake_descriptor)
    durable: int = -1  # the newest version that was said to be on disk
    in_memory: int = -1  # the newest version that was seen complete

    def __post_init__(self) -> None:
        self.frames = Frames(self.descriptors, self.wake)

    def close(self) -> None:
        self.frames.close()
        for descriptor in (*self.descriptors, self.wake):
            os.close(descriptor)

    def writer(self, rule: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "elastic_harness.checkpoint.writer", "--folder", str(self.folder)]
        command += ["--frames", shared_frames.to_text(self.descriptors), "--wake", str(self.wake)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[*self.descriptors, self.wake],
            env={**os.environ, failpoints.VARIABLE: rule},
        )

    def save(self, version: int, rule: str = "") -> bool:
        """Have two processes copy a state, one of which may be killed; False if one was."""
        upload = Upload(self.url, keep_last=KEEP) if self.url else None
        policy = Policy(Retention(KEEP), upload).to_json()
        header = {"skeleton": {"version": version}, "meta": {"lineage": 0}, "policy": policy, "part": None}
        state = state_at(version)
        deadline = time.monotonic() + 30
        while (begun := self.frames.open_snapshot(version, 0, list(state), header, shares=2)) is None:
            assert time.monotonic() < deadline, "no frame became free"
            time.sleep(0.005)
        context = multiprocessing.get_context("fork")
        copiers = [context.Process(target=copy_share, args=(begun, state, index, rule)) for index in (0, 1)]
        for copier in copiers:
            copier.start()
        for copier in copiers:
            copier.join()
        self.frames.wake()
        if begun.complete:
            self.in_memory = version
        return all(copier.exitcode == 0 for copier in copiers)

    def note_durable(self) -> None:
        for snapshot in self.frames.complete():
            if snapshot.outcome == SnapshotOutcome.DURABLE:
                self.durable = max(self.durable, snapshot.version)


def copy_share(begun: tiers.Snapshot, state: dict[Slice, torch.Tensor], index: int, rule: str) -> None:
    """In a process of its own."""
    failpoints._RULES[:] = failpoints._parse(rule) if index == 1 else []
    failpoints.failpoint("checkpoint.begun", begun.version)
    tiers.copy(begun, state, begun.share(index))
    failpoints.failpoint("checkpoint.copied", begun.version)
    begun.finish_share(index)


def check_content(checkpoint: Checkpoint) -> None:
    """Raises if a checkpoint is not exactly the state of its step."""
    skeleton, tensors, _ = local.load(checkpoint)
    expected = {of.tensor: tensor for of, tensor in state_at(checkpoint.step).items()}
    same = skeleton == {"version": checkpoint.step} and tensors.keys() == expected.keys()
    if not same or not all(torch.equal(tensors[name], expected[name]) for name in expected):
        raise CheckpointCorrupt(f"{checkpoint.path} is not the state of step {checkpoint.step}")


def problems(trial: Trial, *, finished: bool) -> list[str]:
    """What is wrong with what is visible now."""
    found = []
    visible = newest(trial.folder)
    for checkpoint in visible:
        try:
            check_content(checkpoint)
        except CheckpointCorrupt as error:
            if checkpoint.path.exists():  # else it was removed, as it should be, while it was read
                found.append(f"bad: {error}")
    if trial.durable > max((checkpoint.step for checkpoint in visible), default=-1):
        found.append(f"lost: {trial.durable} was on disk, now the newest is {[c.step for c in visible]}")
    complete = [snapshot.version for snapshot in trial.frames.complete()]
    if trial.in_memory > max(complete, default=-1):
        found.append(f"lost: {trial.in_memory} was in memory, now {complete}")
    if finished:
        if trial.in_memory > max((checkpoint.step for checkpoint in visible), default=-1):
            found.append(f"lost: {trial.in_memory} was in memory and is not on disk in the end")
        left = [p.name for p in trial.folder.iterdir() if not re.fullmatch(r"step-\d{8}|latest|best", p.name)]
        if left or len(visible) > KEEP:
            found.append(f"left behind: {left}, {len(visible)} checkpoints")
        if trial.url:
            found += remote_problems(trial)
    return found


def remote_problems(trial: Trial) -> list[str]:
    """Everything in the object storage that has a manifest must be whole, the newest too."""
    found = []
    names = transfer.names(trial.url or "")
    for name in names:
        with tempfile.TemporaryDirectory() as there:
            try:
                check_content(transfer.pull(f"{trial.url}/{name}", Path(there)))
            except CheckpointCorrupt as error:
                found.append(f"bad upload: {error}")
    if not names or int(names[0][5:]) < trial.durable:
        found.append(f"lost: {trial.durable} should be uploaded, there are {names}")
    return found


def run_trial(phase: str, place: str, hit: int, folder: Path, url: str | None) -> tuple[bool, list[str]]:
    """Whether the kill happened, and what was wrong afterwards."""
    rule = f"{place} hit={hit} kill"
    trial = Trial(folder, url)
    writer = trial.writer("" if phase == "copy" else rule)
    happened = False
    try:
        for version in range(1, SAVES + 1):
            happened = not trial.save(version, rule if phase == "copy" else "") or happened
            deadline = time.monotonic() + (0.1 if version % 2 else 5.0)  # some follow each other quickly
            while writer.poll() is None and time.monotonic() < deadline:
                trial.note_durable()
                if trial.durable >= version:
                    break
                time.sleep(0.001)
            if happened or writer.poll() is not None:
                break
        if phase == "upload" and writer.poll() is None:
            try:
                writer.wait(5.0)
            except subprocess.TimeoutExpired:
                pass
        happened = happened or writer.poll() is not None
        if phase == "copy":
            writer.kill()
            writer.wait()
        trial.note_durable()
        found = problems(trial, finished=False)
        if writer.poll() is None:
            assert writer.stdin is not None
            writer.stdin.close()
            writer.wait(60)
        successor = trial.writer()
        assert successor.stdin is not None
        time.sleep(0.02)
        successor.stdin.close()
        successor.wait(60)
        trial.note_durable()
        return happened, found + problems(trial, finished=True)
    finally:
        writer.kill()
        writer.wait()
        assert writer.stdin is not None
        writer.stdin.close()
        trial.close()


def kill_agents(folder: Path, kills: int, rng: random.Random) -> tuple[int, list[str]]:
    """A real job whose agent is killed again and again; it must end with the weights of one that is left alone."""

    def job(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "elastic_harness", "launch", "--nproc-per-node", "2", "--quiet"]
        command += ["--run-dir", str(folder / name), "-m", "elastic_harness.train", "--", "training.max_steps=120"]
        command += ["model.n_layer=1", "model.d_model=64", "checkpoint.checkpoint_interval=4"]
        command += ["checkpoint.memory_snapshot_interval=1"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def events(name: str, kind: str) -> list[dict[str, object]]:
        path = folder / name / "events.jsonl"
        return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []

    undisturbed, disturbed = job("undisturbed"), None
    undisturbed.wait()
    disturbed = job("disturbed")
    done = 0
    while done < kills and disturbed.poll() is None:
        begun = len(events("disturbed", "step_committed"))
        deadline = time.monotonic() + 60
        while len(events("disturbed", "step_committed")) < begun + 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(rng.random() * 0.4)
        try:
            os.kill(json.loads((folder / "disturbed" / "run.json").read_text())["agent_pid"], signal.SIGKILL)
            done += 1
        except (TypeError, KeyError, ProcessLookupError, ValueError):
            break
    disturbed.wait()
    ends = [events(name, "run_finished")[-1].get("weights_sha256") for name in ("undisturbed", "disturbed")]
    found = [] if ends[0] == ends[1] is not None else [f"weights differ after {done} kills: {ends}"]
    command = [sys.executable, "-m", "elastic_harness", "verify", str(folder / "disturbed")]
    checked = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    found += [] if checked.returncode == 0 else ["the ledger has a gap: see `elastic-harness verify`"]
    found += [f"bad: {c.path}" for c in newest(folder / "disturbed" / "checkpoints") if not is_whole(c)]
    return done, found


def is_whole(checkpoint: Checkpoint) -> bool:
    try:
        local.check(checkpoint)
        return True
    except CheckpointCorrupt:
        return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=240)
    parser.add_argument("--agent-kills", type=int, default=AGENT_KILLS, help="at most 10: then the launcher gives up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="default: benchmarks/results/checkpoint_kills.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # it is going to be forked
    rng = random.Random(arguments.seed)
    counts: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    missed = 0
    wrong: list[str] = []
    begun = time.monotonic()

    def one(phase: str, url: Callable[[], str | None]) -> None:
        nonlocal missed
        place = rng.choice(PHASES[phase])
        hit = rng.randint(1, MOST_HITS.get(place, 3))
        with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
            folder = Path(scratch) / "checkpoints"
            folder.mkdir()
            happened, found = run_trial(phase, place, hit, folder, url())
        if happened:
            counts[phase][place] += 1
        else:
            missed += 1
        wrong.extend(f"{place} hit {hit}: {problem}" for problem in found)

    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        with s3_server.serving(Path(scratch)) as variables:
            os.environ.update(variables)
            number = 0
            while sum(sum(c.values()) for c in counts.values()) < arguments.moments and missed < arguments.moments:
                phase = list(PHASES)[number % len(PHASES)]
                number += 1
                one(phase, lambda phase=phase, number=number: (  # type: ignore[misc]
                    f"{s3_server.URL}/{number}" if phase == "upload" else None
                ))  # fmt: skip
                if number % 10 == 0:
                    done = sum(sum(c.values()) for c in counts.values())
                    say(f"{done} kills, {missed} not reached, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s")
        agents = arguments.agent_kills
        agent_kills, found = kill_agents(Path(scratch), agents, rng) if agents else (0, [])
        wrong += found
    for problem in wrong:
        say(problem)
    per_phase = {phase: {"kills": sum(c.values()), "places": dict(c)} for phase, c in counts.items()}
    finish(
        "checkpoint_kills",
        {
            "kills": sum(entry["kills"] for entry in per_phase.values()) + agent_kills,
            "phases": {**per_phase, "agent, any moment": {"kills": agent_kills}},
            "place not reached": missed,
            "bad or lost": wrong,
            "bytes of the state": 4 * (FROZEN + TRAINED) + 8,
        },
        arguments.out,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
