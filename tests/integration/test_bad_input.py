"""Bad input, bad places and bad workers, with the real trainer and real scripts: a clear message and the right code."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_harness.contract.variables import FAILPOINTS
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import causes, environment
from integration.preloaded import ONE_THREAD, preloaded
from integration.script_tools import PATIENCE_S, SCRIPTS, execute, forked, launch, one_message, python, said

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).parents[2] / "configs"
ODD, REFUSED = SCRIPTS / "odd.py", SCRIPTS / "refused.py"


# ---- configuration and data


def trainer(*settings: object) -> subprocess.CompletedProcess[str]:
    return forked("-m", "elastic_harness.train", "--config", CONFIGS / "small.yaml", "training.max_steps=6", *settings)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("training.max_step=3", "Did you mean training.max_steps?"),
        ("data.path={}/missing", "missing does not exist"),
        ("data.path={}/empty.txt", "holds no text"),
        ("data.path={}/short.txt", "one window needs seq_length + 1 = 129"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(tmp_path: Path, setting: str, named: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    ended = trainer("--run-dir", tmp_path / "run", setting.format(tmp_path))
    assert ended.returncode == 2, said(ended)
    assert named in one_message(ended) and len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_launcher_gives_the_configuration_s_exit_code(tmp_path: Path) -> None:
    ended = execute(
        [
            *(sys.executable, "-m", "elastic_harness", "launch", "--standalone", "--nproc-per-node", 2),
            *("--run-dir", tmp_path / "run", "-m", "elastic_harness.train", f"data.path={tmp_path}/missing"),
        ],
        {},
    )
    assert ended.returncode == 2, said(ended)
    assert "missing', which does not exist" in one_message(ended) and not ended.stdout
    assert not (tmp_path / "run").exists(), "it is said before a worker is started"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = python(ODD, "none", 0, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert ended.returncode == 4, said(ended)
    assert port in one_message(ended).splitlines()[-1]


# ---- the run folder


def train_beside_a_full_disk(tmp_path: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """A program whose process that writes checkpoints may only write small files."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import resource, sys\n"
        "if any('checkpoint.writer' in word for word in sys.orig_argv):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
    )
    variables = {**environment(), **ONE_THREAD, "PYTHONPATH": f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"}
    return preloaded().run([sys.executable, *map(str, command)], variables, PATIENCE_S, for_writers=["PYTHONPATH"])


@pytest.mark.parametrize("failing", ["the worker", "the writer"])
@pytest.mark.parametrize("launched", [True, False], ids=["launched", "alone"])
def test_a_checkpoint_that_fails_ends_the_job_if_that_is_the_policy(
    tmp_path: Path, failing: str, launched: bool
) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 1000)
    launcher = [*("-m", "elastic_harness", "launch", "--standalone"), "--run-dir", tmp_path / "run"] if launched else []
    settings = ["training.max_steps=2000", "model.n_layer=1", "checkpoint.checkpoint_interval=2", "training.threads=1"]
    settings += ["checkpoint.async_save_policy=fail", f"data.path={tmp_path}/text.txt"]
    trainer = ["-m", "elastic_harness.train", "--config", CONFIGS / "small.yaml"]
    command = (*launcher, *trainer, "--run-dir", tmp_path / "run", *settings)
    if failing == "the worker":
        ended, named = forked(*command, **{FAILPOINTS: "checkpoint.copied step=2 raise"}), "checkpoint.copied"
    else:
        ended, named = train_beside_a_full_disk(tmp_path, *command), "cannot be written"
    assert ended.returncode == 4, said(ended)
    text = one_message(ended)
    assert named in text and "async_save_policy is fail" in text, said(ended)
    failed = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "checkpoint_failed"]
    assert failed and failed[0]["step"] == 2 and failed[0]["fatal"] and failed[0]["code"] == "EH-S102"


@pytest.mark.parametrize("launched", [True, False], ids=["launched", "alone"])
def test_the_last_checkpoint_that_fails_ends_the_job_if_that_is_the_policy(tmp_path: Path, launched: bool) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 1000)
    launcher = [*("-m", "elastic_harness", "launch", "--standalone"), "--run-dir", tmp_path / "run"] if launched else []
    settings = ["training.max_steps=6", "model.n_layer=1", "checkpoint.checkpoint_interval=0", "training.threads=1"]
    settings += ["checkpoint.async_save_policy=fail", f"data.path={tmp_path}/text.txt"]
    trainer = ["-m", "elastic_harness.train", "--config", CONFIGS / "small.yaml"]
    ended = train_beside_a_full_disk(tmp_path, *launcher, *trainer, "--run-dir", tmp_path / "run", *settings)
    assert ended.returncode == 4, said(ended)
    assert "async_save_policy is fail" in one_message(ended), said(ended)


def test_a_full_disk_costs_checkpoints_first_and_the_job_last(tmp_path: Path) -> None:
    """The process that writes checkpoints may only write small files; the weights have something in their way."""
    (tmp_path / "run" / "weights.safetensors" / "in the way").mkdir(parents=True)
    module = ("-m", "elastic_harness.train", "--config", CONFIGS / "small.yaml")
    (tmp_path / "text.txt").write_text("a line of text\n" * 1000)
    settings = ("training.max_steps=5", "model.n_layer=1", "checkpoint.checkpoint_interval=2")
    data = f"data.path={tmp_path}/text.txt"
    ended = train_beside_a_full_disk(tmp_path, *module, "--run-dir", tmp_path / "run", *settings, data)
    assert ended.returncode == 4, said(ended)
    text = one_message(ended)
    assert "The checkpoint of step 2 cannot be written" in text and "The trained weights cannot be written" in text
    committed = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "step_committed"]
    assert len(committed) == 5
    left = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert not left, "a partial checkpoint was left behind"


def test_weights_that_cannot_be_written_end_the_job_at_once(tmp_path: Path) -> None:
    """The run folder is everybody's: no other worker tries in turn."""
    (tmp_path / "run" / "weights.safetensors" / "in the way").mkdir(parents=True)
    ended = launch(tmp_path / "run", ODD, "none", 0, options=("--nproc-per-node", 2))
    assert ended.returncode == 4, said(ended)
    assert "The trained weights cannot be written" in ended.stdout
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert len([e for e in events if e["event"] == "worker_started"]) == 2
    assert max(e["step"] for e in events if e["event"] == "checkpoint_saved") == 20
    assert causes(tmp_path / "run") == ["EH-S112"]


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = forked(ODD, "none", 0, "--run-dir", tmp_path / "file" / "run")
    assert ended.returncode == 4, said(ended)
    assert str(tmp_path / "file" / "run") in one_message(ended)


# ---- what cannot be trained exactly


@pytest.mark.parametrize(("case", "code", "named"), [("lbfgs", 2, "LBFGS"), ("buffer-assigned", 1, "Buffer running")])
def test_what_cannot_be_exact_is_refused_under_the_launcher(tmp_path: Path, case: str, code: int, named: str) -> None:
    ended = launch(tmp_path / "run", REFUSED, case, options=("--nproc-per-node", 2))
    assert ended.returncode == code, said(ended)
    assert named in ended.stdout and "was not refused" not in ended.stdout


# ---- a worker that is not like the others


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights when nobody is odd."""
    folder = tmp_path_factory.mktemp("usual")
    ended = forked(ODD, "none", 0, "--run-dir", folder)
    assert ended.returncode == 0, said(ended)
    return weights(folder)


def weights(run_dir: Path) -> str:
    assert verify(run_dir).ok, verify(run_dir)
    return str([e for e in read_events(run_dir / "events.jsonl") if e["event"] == "run_finished"][-1]["weights_sha256"])


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("threads", "threads: the run has 1, this worker 2"),
        ("isa", "this worker 'DEFAULT'"),
        ("model", "model.layout: the run has"),
        ("arithmetic", "the canary of ranks"),
        ("noise", "read other samples under the same numbers"),
        ("drift", "the state of version 8 (0.weight … 2.bias, states of policies) of ranks"),
    ],
)
def test_an_odd_worker_is_refused_and_the_others_stay_exact(
    tmp_path: Path, usual: str, kind: str, named: str
) -> None:
    workers = 3 if kind in ("arithmetic", "noise", "drift") else 2
    ended = launch(tmp_path / "run", ODD, kind, 1, options=("--nproc-per-node", workers))
    assert ended.returncode == 0, said(ended)
    assert named in ended.stdout, said(ended)
    assert weights(tmp_path / "run") == usual
    codes = {"arithmetic": "EH-C101", "noise": "EH-U109", "drift": "EH-C101 → EH-C102"}
    assert causes(tmp_path / "run") == [codes.get(kind, "EH-R102")]
    commits = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "step_committed"]
    if kind == "drift":  # found after it has taken part, so the others are started again, from before it
        assert commits[0]["world_size"] == workers and commits[-1]["world_size"] == workers - 1
    else:
        assert {e["world_size"] for e in commits} == {workers - 1}


def test_the_majority_decides_who_is_odd(tmp_path: Path, usual: str) -> None:
    """The worker at the first place has two threads, the two others one."""
    ended = launch(tmp_path / "run", ODD, "threads", 0, options=("--nproc-per-node", 3))
    assert ended.returncode == 0, said(ended)
    assert "threads: the run has 1, this worker 2" in ended.stdout, said(ended)
    assert weights(tmp_path / "run") == usual


def test_a_data_set_that_nothing_has_seeded_is_named_and_ends_a_job_with_a_minimum(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", ODD, "noise", "all", options=("--nproc-per-node", 3, "--min-workers", 2))
    assert ended.returncode == 1, said(ended)
    assert "read different samples under the same numbers (1 of at least 2 workers are left)" in ended.stdout
    assert "seed the dataset" in ended.stdout and "memory and CPU" not in ended.stdout
    blocks = [line for line in ended.stdout.splitlines() if line.startswith("│ what") and "other samples" in line]
    assert len(blocks) == 1, said(ended)


def test_an_odd_joiner_is_caught_by_the_canary(tmp_path: Path, usual: str) -> None:
    """Two workers agree, so the third, and whoever takes its place, is told apart; the run's weights stay exact."""
    ended = launch(tmp_path / "run", ODD, "arithmetic", 0, options=("--nproc-per-node", 3))
    assert ended.returncode == 0, said(ended)
    assert weights(tmp_path / "run") == usual


# ---- user code


def test_an_error_on_one_worker_costs_only_that_worker(tmp_path: Path, usual: str) -> None:
    ended = launch(tmp_path / "run", ODD, "raise", 1, options=("--nproc-per-node", 2))
    assert ended.returncode == 0, said(ended)
    assert "ValueError: planted at step 7" in ended.stdout
    assert weights(tmp_path / "run") == usual


def test_a_sample_that_always_fails_is_named(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", ODD, "raise-slot", "all", options=("--nproc-per-node", 3))
    if "planted in sample 3" not in ended.stdout:
        pytest.fail(f"sample 3 is not in step 9: choose another step\n{said(ended)}")
    assert ended.returncode == 1, said(ended)
    assert "failed on 2 workers" in ended.stdout and "its samples are [3]" in ended.stdout
