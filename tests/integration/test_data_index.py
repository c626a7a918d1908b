"""Indexes with real processes: builds that are killed, several processes, training on an index while workers die."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_harness.data.token_index import TokenIndexFile
from elastic_harness.runs.verify import verify
from integration.harness import TrainingJob
from integration.launch_tools import environment, run

pytestmark = pytest.mark.slow
SMALL_UNITS = """
import sys
from elastic_harness import cli
from elastic_harness.data import readers
readers.UNIT_BYTES = 20_000
sys.exit(cli.main(["index", "build", *sys.argv[1:]]))
"""
KILLED_IN_REMOVAL = """
import os, pathlib, signal
unlink, removed = pathlib.Path.unlink, []
def counting(path, *more, **options):
    if path.parent.name.endswith(".parts") and (path.parent.parent / "i.bin").exists():
        if len(removed) == {after}:
            os.kill(os.getpid(), signal.SIGKILL)
        removed.append(path)
    unlink(path, *more, **options)
pathlib.Path.unlink = counting
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(4)
    words = [f"word{i}" for i in range(500)]
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    with open(path, "w") as file:
        for _ in range(6000):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(1, 90)))}) + "\n")
    return path


def command(corpus: Path, output: Path, processes: int) -> list[str]:
    return [sys.executable, "-c", SMALL_UNITS, str(corpus), "-o", str(output), "--processes", str(processes)]


def children_of(pid: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(entry.name)
    return found


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    output = tmp_path_factory.mktemp("whole") / "i.bin"
    subprocess.run(command(corpus, output, 1), env=environment(), check=True, capture_output=True)
    TokenIndexFile(output).verify()
    return output.read_bytes()


def test_the_bytes_do_not_depend_on_the_processes(corpus: Path, whole: bytes, tmp_path: Path) -> None:
    subprocess.run(command(corpus, tmp_path / "i.bin", 3), env=environment(), check=True, capture_output=True)
    assert (tmp_path / "i.bin").read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["i.bin"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_build_goes_on_and_gives_the_same_bytes(
    corpus: Path, whole: bytes, tmp_path: Path, processes: int
) -> None:
    draw, output, killed = random.Random(processes), tmp_path / "i.bin", 0
    for _ in range(12):
        build = subprocess.Popen(command(corpus, output, processes), env=environment(), stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.05, 0.7))
        children = children_of(build.pid)
        build.kill()
        killed += build.wait() == -signal.SIGKILL
        end = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < end, f"processes of the build live on: {children}"
            time.sleep(0.01)
        if output.exists():  # never half an index
            assert output.read_bytes() == whole
            output.unlink()
    assert killed > 3
    again = subprocess.run(command(corpus, output, processes), env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert output.read_bytes() == whole
    assert not list(tmp_path.glob(".i.bin.parts"))


@pytest.mark.parametrize("removed", range(0, 12, 3))
def test_parts_whose_removal_was_interrupted_are_made_again(
    corpus: Path, whole: bytes, tmp_path: Path, removed: int
) -> None:
    """The index is there, the process is killed while it removes the parts, and somebody removes the index."""
    output = tmp_path / "i.bin"
    _, c, script, *arguments = command(corpus, output, 1)
    killed = KILLED_IN_REMOVAL.format(after=removed) + script
    build = subprocess.run([sys.executable, c, killed, *arguments], env=environment(), capture_output=True)
    assert build.returncode == -signal.SIGKILL and output.read_bytes() == whole
    output.unlink()
    again = subprocess.run(command(corpus, output, 1), env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert output.read_bytes() == whole and not list(tmp_path.glob(".i.bin.parts"))


def test_ctrl_c_says_that_the_parts_are_kept(corpus: Path, tmp_path: Path) -> None:
    build = subprocess.Popen(
        command(corpus, tmp_path / "i.bin", 2), env=environment(), stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 30
    while not (tmp_path / ".i.bin.parts").exists():
        assert build.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    os.kill(build.pid, signal.SIGINT)
    _, said = build.communicate(timeout=60)
    assert build.returncode == 130 and "goes on there" in said, said


def kill_three_times(job: TrainingJob) -> None:
    job.fill()
    for place in ("slot.backward", "exchange.partial_sent", "apply.optimizer"):
        job.fault(1, place)
        job.fill()


def test_training_on_an_index_survives_kills_to_the_same_weights(
    train: Callable[..., TrainingJob], corpus: Path, tmp_path: Path
) -> None:
    """With a tail in each epoch: the number of samples is no multiple of the batch."""
    short = tmp_path / "short.jsonl"
    short.write_text("".join(corpus.read_text().splitlines(keepends=True)[:12]))
    built = run("index", "build", short, "-o", tmp_path / "i.bin", "--train-bpe", 300)
    assert built.returncode == 0, built.stderr
    settings = [f"data.path={tmp_path}/i.bin", "model.vocab_size=320", "data.validation_fraction=0.1"]
    alone = train(1, steps=24, settings=settings)
    expected = alone.finish()["weights_sha256"]
    verdict = verify(alone.run_dir)
    assert verdict.ok and verdict.epochs_complete > 1, verdict
    job = train(3, steps=24, settings=settings)
    kill_three_times(job)
    job.finish(expected=expected)
    said = run("generate", job.run_dir, "--prompt", "word", "--tokens", 5)
    assert said.returncode == 0 and said.stdout.startswith("word"), said


def test_a_vocabulary_that_is_too_small_is_named(corpus: Path, tmp_path: Path) -> None:
    assert run("index", "build", corpus, "-o", tmp_path / "i.bin").returncode == 0
    options = ("--standalone", "--nproc-per-node", 1, "--run-dir", tmp_path / "run", "-m", "elastic_harness.train")
    ended = run("launch", *options, f"data.path={tmp_path}/i.bin")
    assert ended.returncode == 2, ended
    assert "model.vocab_size is 256" in ended.stdout and "model.vocab_size=320" in ended.stdout


def test_training_on_a_mixture_of_separate_documents_survives_kills_to_the_same_weights(
    train: Callable[..., TrainingJob], corpus: Path, tmp_path: Path
) -> None:
    """The weights of the sources change, one source is gone through several times, and many tokens have no label."""
    lines = corpus.read_text().splitlines(keepends=True)
    for name, part in (("web", lines[:400]), ("code", lines[400:403])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        assert run("index", "build", tmp_path / f"{name}.jsonl", "-o", tmp_path / f"{name}.bin").returncode == 0
    settings = [
        f"data.sources={{web: {tmp_path}/web.bin, code: {tmp_path}/code.bin}}",
        "data.weights={web: 0.7, code: 0.3}",
        "data.weight_changes={9: {web: 0.25, code: 0.75}}",
        "data.documents=separate",
        "model.vocab_size=320",
    ]
    alone = train(1, steps=24, settings=settings)
    expected = alone.finish()["weights_sha256"]
    job = train(3, steps=24, settings=settings)
    kill_three_times(job)
    job.finish(expected=expected)
    verdict = verify(job.run_dir)
    assert verdict.ok, verdict
    used = {name: count for name, _, count in verdict.sources}
    batch = verdict.samples // verdict.steps
    assert used == {"web": round(9 * batch * 0.7) + round(15 * batch * 0.25), "code": verdict.samples - used["web"]}
    assert used["code"] > {name: size for name, size, _ in verdict.sources}["code"]
    assert "times its" in str(verdict)
