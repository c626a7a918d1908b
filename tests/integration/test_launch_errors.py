"""Bad input and bad luck: each gets a clear message and the right exit code, and never a hang."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_harness.agent.control.server import request
from elastic_harness.contract.commands import StopRun
from integration.launch_tools import Job, causes, command, environment, left_behind, run, workers

pytestmark = pytest.mark.slow
Start = Callable[..., Job]


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


# ---- the command line


def test_help_is_quick_and_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, elastic_harness.cli, elastic_harness.commands.launch, elastic_harness.commands.manage, "
        "elastic_harness.agent.__main__; print([m for m in ('torch', 'numpy', 'rich', 'yaml') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]", loaded.stderr
    least = min(_processor_seconds(command("--help")) for _ in range(5))
    assert least < 0.2


def _processor_seconds(arguments: list[str]) -> float:
    """How long a command computes. That does not depend on what else the machine does."""
    pid = os.posix_spawn(
        arguments[0], arguments, environment(), file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    )
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--nnodes", "2:4", "x.py"), "--store"),
        (("--nproc-per-node", "0", "x.py"), "--nproc-per-node"),
        (("--nproc-per-node", "2", "--min-workers", "3", "x.py"), "--min-workers"),
        (("--spares", "-1", "x.py"), "--spares"),
        (("--no-such-option", "x.py"), "no-such-option"),
        ((), "script"),
    ],
)
def test_a_wrong_command_line_is_exit_2(tmp_path: Path, arguments: tuple, named: str) -> None:
    ended = run("launch", *arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert named in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["training.precision=bf16"], "only the built-in trainer reads it, as trainer.precision"),
        (["trainer.device=cuda"], "trainer.device is 'cuda', but this machine has none of /dev/nvidia"),
        (["scheduler.warmup_steps=300", "training.max_steps=60"], "scheduler.warmup_steps is 300"),
        (["training.global_batch_samples=7", "training.micro_batch_samples=2"], "training.global_batch_samples is 7"),
        (["--config", "missing.yaml"], "missing.yaml does not exist"),
        (["data.path=missing/"], "data.path is 'missing/', which does not exist"),
        (["data.sources={a: missing.bin}"], "data.sources.a is 'missing.bin', which does not exist"),
    ],
)
def test_settings_of_the_built_in_trainer_that_cannot_work_are_one_line_before_anything_starts(
    tmp_path: Path, settings: list[str], named: str
) -> None:
    if "cuda" in settings[0] and list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    ended = run("launch", "--nproc-per-node", 2, "-m", "elastic_harness.train", *settings, cwd=tmp_path)
    assert ended.returncode == 2
    assert named in ended.stderr and ended.stderr.count("\n") == 1 and not ended.stdout
    assert not (tmp_path / "runs").exists()


def test_scaling_before_any_worker_has_called_start_says_so(start: Start, tmp_path: Path) -> None:
    slow_start = script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    job = start(options=workers(2), script=slow_start)
    job.until(lambda: "ready" in job.shown(), "ready")
    refused = run("scale", job.run_dir, "--workers", 3)
    assert refused.returncode == 2
    assert "no worker has called elastic_harness.start() yet" in refused.stderr and "does not use" not in refused.stderr
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_a_missing_script_is_exit_2(start: Start, tmp_path: Path) -> None:
    job = start(options=workers(2), script=tmp_path / "missing.py")
    assert job.wait() == 2
    assert "missing.py" in job.output


@pytest.mark.parametrize(
    ("options", "script", "code", "named"),
    [
        (("--no-python",), "missing", 2, "there is no program"),
        ((), "missing.py", 2, "there is no script"),
        (("-m",), "missing_module", 2, "there is no module 'missing_module'"),
        (("-m",), "elastic_harness.missing", 2, "there is no module 'elastic_harness.missing'"),
        (("-m",), "elastic_harness.gpt", 2, "a package without a __main__ module"),
        ((), "broken.py", 1, "line 2: invalid syntax"),
        ((), "zeros.py", 1, "null bytes"),
        ((), "missing_import.py", 1, "missing_import.py, line 3: there is no module 'not_there_at_all' in this Python"),
        (("-m",), "missing_import", 1, "line 3: there is no module 'not_there_at_all'"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line_before_any_worker(
    tmp_path: Path, options: tuple[str, ...], script: str, code: int, named: str
) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "zeros.py").write_bytes(b"x = 1\0")
    imports = "import json, os.path\nimport elastic_harness, numpy as np\nfrom not_there_at_all import x\n"
    (tmp_path / "missing_import.py").write_text(imports)
    ended = run("launch", "--nproc-per-node", 2, *options, script, cwd=tmp_path)
    assert ended.returncode == code and not ended.stdout, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    assert named in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "script",
    [
        "import sys\nsys.path.insert(0, 'below')\nimport own_below\n",
        "import finds_more\nimport own_below\n",
        "try:\n    import not_there_at_all\nexcept ImportError:\n    pass\n",
        "if False:\n    import not_there_at_all\n",
        "import beside\n",
        "from __future__ import annotations\nimport builtins, sys, elastic_harness, yaml\n",
    ],
)
def test_an_import_that_may_work_is_not_judged(tmp_path: Path, script: str) -> None:
    (tmp_path / "below").mkdir()
    for name in ("below/own_below", "beside"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "finds_more.py").write_text("import sys\nsys.path.insert(0, 'below')\n")
    (tmp_path / "script.py").write_text(f"{script}print('began')\n")
    ended = run("launch", "--run-dir", "run", "script.py", cwd=tmp_path)
    assert ended.returncode == 0 and "[w0] began" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("options", [(), ("--no-fork-server",)])
def test_an_import_that_fails_in_the_workers_ends_the_job_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "own.py").write_text("import not_there_at_all\n")
    (tmp_path / "script.py").write_text("import own\nimport elastic_harness\n")
    ended = run("launch", "--nproc-per-node", 3, *options, "--run-dir", "run", "script.py", cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "the script cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'" in ended.stdout
    assert "incident" not in ended.stdout and "restart" not in ended.stdout, ended.stdout
    assert causes(tmp_path / "run") == ["EH-U108"]


def test_a_script_in_a_package_or_an_archive_can_be_started(tmp_path: Path) -> None:
    (tmp_path / "package" / "below").mkdir(parents=True)
    for path in ("package/__main__.py", "package/below/script.py"):
        (tmp_path / path).write_text("print('began')")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", "print('began')")
    for words in (("-m", "package"), ("-m", "package.below.script"), ("package",), ("archive",)):
        ended = run("launch", "--run-dir", "run", "--fresh", *words, cwd=tmp_path)
        assert ended.returncode == 0 and "[w0] began" in ended.stdout, (words, ended.stdout + ended.stderr)


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "", "-x", "x" * 102, "a b", "ä"])
def test_a_run_id_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "here" / "there").mkdir(parents=True)
    ended = run("launch", f"--run-id={name}", "nothing.py", cwd=tmp_path / "here" / "there")
    assert ended.returncode == 2 and "--run-id is" in ended.stderr and "letters, digits" in ended.stderr
    assert [p.name for p in tmp_path.rglob("*")] == ["here", "there"]


def test_a_command_that_is_misspelt_is_suggested() -> None:
    ended = run("lanch", "x.py")
    assert ended.returncode == 2 and ended.stderr == (
        "elastic-harness: there is no command 'lanch'; did you mean launch?\n"
    )


# ---- the run folder


def test_a_second_launch_on_a_live_run_is_refused(start: Start) -> None:
    first = start("--steps", 1000, options=workers(1))
    first.until_step(1)
    second = start("--steps", 1000, options=workers(1))
    assert second.process.wait(30) == 2
    assert f"process {first.process.pid} holds it" in second.shown()
    first.send(signal.SIGINT)
    assert first.wait() == 130


def test_the_same_folder_resumes_and_fresh_starts_anew(start: Start, tmp_path: Path) -> None:
    job = start("--steps", 2000, "--step-s", 0.01, options=workers(2))
    job.until_step(5)
    job.send(signal.SIGINT)
    assert job.wait() == 130
    assert job.record()["status"] == "stopped"
    saved = job.events("checkpoint_saved")[-1]["step"]
    assert not job.events("failure_detected", "incident")
    again = start("--steps", saved + 10, options=workers(2))
    finished = again.finish()
    assert finished["version"] == saved + 10
    assert again.events("step_committed")[-1]["lineage"] == 1
    fresh = start("--steps", 5, options=workers(2, "--fresh"))
    fresh.finish()
    assert len(fresh.events("run_started")) == 1
    assert [p for p in tmp_path.iterdir() if ".old-" in p.name]


def test_resume_uses_the_recorded_command(start: Start) -> None:
    job = start("--steps", 40, "--step-s", 0.03, options=workers(2))
    job.until_step(3)
    request(job.record()["control"], StopRun())  # the command itself may take longer to start than all steps
    assert job.wait() == 143
    ended = run("resume", job.run_dir)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert job.events("run_finished")[-1]["version"] == 40


def test_another_fingerprint_is_refused_with_the_difference(start: Start) -> None:
    start("--steps", 5, "--seed", 7, options=workers(2)).finish()
    other = start("--steps", 5, "--seed", 8, options=workers(2))
    assert other.wait() == 2
    assert "run.seed: the run has 7, this worker 8" in other.output
    assert {*other.causes()} == {"EH-R102", "EH-R102 → EH-R101"}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run("launch", "--run-dir", tmp_path / "file" / "run", __file__)
    assert ended.returncode == 4
    assert str(tmp_path / "file" / "run") in ended.stderr and "Traceback" not in ended.stderr


def test_a_full_disk_at_the_start_ends_the_job_with_a_message(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to("/dev/full")
    job = start("--steps", 50, options=workers(2))
    assert job.wait() == 4
    assert "No space left on device" in job.output and "Traceback" not in job.output


def test_a_disk_that_fills_up_ends_the_job_with_a_message(start: Start, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        job = start("--steps", 500, options=workers(2, "--quiet"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert job.wait() == 4
    assert "cannot write" in job.output and "resume" in job.output and "Traceback" not in job.output
    assert len(job.events("step_committed")) > 5


def test_a_deep_folder_has_a_control_socket_too(tmp_path: Path) -> None:
    job = Job(tmp_path / ("d" * 60) / ("e" * 60) / "run", "--steps", 1000, options=workers(1))
    try:
        job.until_step(1)
        control = Path(job.record()["control"])
        assert not control.is_relative_to(tmp_path) and control.exists()
        os.kill(job.record()["agent_pid"], signal.SIGKILL)
        job.until_event("run_started", 2)
        job.until(lambda: job.record()["agent_pid"] and job.events("generation")[1:], "a second generation")
        assert run("stop", job.run_dir).returncode == 0
        assert job.wait() == 143
        assert not control.parent.exists()
    finally:
        job.close()


def test_a_damaged_record_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")
    job = start(options=workers(1))
    assert job.wait() == 4
    assert "run.json is damaged" in job.output


# ---- user code


def test_an_error_before_start_on_every_worker_ends_the_job(start: Start) -> None:
    job = start("--raise-early", options=workers(3))
    assert job.wait() == 1
    assert "every worker failed in the same way: RuntimeError: planted before start()" in job.output
    assert job.output.count("┌─ incident") == 1
    assert job.causes() == ["EH-U104 → EH-U107"]


def test_an_error_on_every_worker_before_the_first_step_ends_the_job(start: Start) -> None:
    job = start("--raise-at", 0, options=workers(3))
    assert job.wait() == 1
    assert "every worker failed before the first step: ValueError: planted at step 0" in job.output
    assert job.output.count("┌─ incident") == 1
    assert {*job.causes()} == {"EH-U101", "EH-U101 → EH-U107"}


def test_half_the_workers_never_get_to_start(start: Start) -> None:
    """Those that are left decide on the run's fingerprint once the places of the others were given up."""
    job = start("--steps", 5, "--raise-early-from", 2, options=workers(4, "--min-workers", 1, "--max-restarts", 0))
    job.finish()
    assert {e["world_size"] for e in job.events("step_committed")} <= {1, 2}


def test_an_error_on_one_worker_gives_up_its_place(start: Start) -> None:
    job = start("--steps", 60, "--raise-at", 20, "--raise-index", 1, options=workers(2))
    job.finish()
    assert "ValueError: planted at step 20" in job.output


def test_a_poison_slot_stops_the_job_and_names_the_samples(start: Start) -> None:
    job = start("--steps", 40, "--slot-error-at", 10, options=workers(2))
    assert job.wait() == 1
    assert "slot 3 of step 10 failed on 2 workers" in job.output
    assert "[17, 4]" in job.output
    (cause,) = job.causes()
    assert cause in ("EH-U103", "EH-U102 → EH-U103"), "both may fail before one is reported"


def test_leaving_the_loop_early_is_no_endless_restart(start: Start) -> None:
    job = start("--steps", 40, "--leave-at", 10, options=workers(2))
    assert job.wait() == 1
    assert "before the last step" in job.output
    assert {*job.causes()} == {"EH-U105", "EH-U105 → EH-U107"}


# ---- signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_stop_the_job_with_nothing_left(start: Start, number: int, code: int) -> None:
    job = start("--steps", 1000, options=workers(2, "--spares", 1))
    job.until_step(3)
    job.send(number)
    assert job.wait() == code
    assert not job.events("failure_detected", "incident")
    assert job.causes() == ["EH-P102 → EH-P105" if number == signal.SIGTERM else "EH-P105"]


def test_a_second_interrupt_stops_at_once(start: Start, tmp_path: Path) -> None:
    stubborn = script(
        tmp_path,
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, "
        "signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)\n",
    )
    job = start(options=workers(1, "--grace", 600), script=stubborn)
    job.until(lambda: "ready" in job.shown(), "ready")
    job.send(signal.SIGINT)
    job.until(lambda: "SIGINT: stopping" in job.shown(), "the first signal")
    job.send(signal.SIGINT)
    assert job.wait() == 130


def test_the_launchers_death_leaves_nothing_and_the_run_resumes(start: Start) -> None:
    job = start("--steps", 2000, "--step-s", 0.01, options=workers(2))
    job.until_step(5)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert not left_behind(job.run_dir, 20.0)
    steps = job.events("checkpoint_saved")[-1]["step"] + 5
    start("--steps", steps, options=workers(2)).finish()


# ---- plain scripts

PLAIN = """
import os, sys
rank, count = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "port", os.environ["MASTER_PORT"], "start", count, flush=True)
if rank == "1" and count == 0:
    {failure}
if count == 0:
    import time
    time.sleep(600)
"""


@pytest.mark.parametrize("failure", ["os.kill(os.getpid(), 9)", "raise ValueError('planted')"])
def test_a_plain_script_is_restarted_as_a_whole_at_a_new_address(start: Start, tmp_path: Path, failure: str) -> None:
    job = start(options=workers(3), script=script(tmp_path, PLAIN.format(failure=failure)))
    assert job.wait() == 0, job.output
    shown = [line for line in job.output.splitlines() if line.startswith("[w") and " port " in line]
    lines = [line.split("] ", 1)[1].split() for line in shown]
    ports = {count: {line[5] for line in lines if line[7] == count} for count in ("0", "1")}
    assert len(ports["1"]) == 1 and ports["0"].isdisjoint(ports["1"])
    assert len([line for line in lines if line[7] == "1"]) == 3
    (failure_event,) = job.events("failure_detected")
    assert failure_event["rank"] == 1, "only the culprit is a failure"
    assert job.causes() == ["EH-W101" if "kill" in failure else "EH-U104"]


PEERS = """
import os, socket, time
port, count = int(os.environ["MASTER_PORT"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if count:
    raise SystemExit
if os.environ["RANK"] == "1":
    with socket.create_server(("127.0.0.1", port)) as server:
        peer, _ = server.accept()
    peer.close()
    time.sleep(0.3)
    {end}
while True:
    try:
        peer = socket.create_connection(("127.0.0.1", port))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
if not peer.recv(1):
    {error}
"""


@pytest.mark.parametrize(
    ("end", "error", "culprit"),
    [
        ("os.kill(os.getpid(), 9)", "raise ConnectionResetError('Connection reset by peer')", 1),
        ("raise SystemExit(137)", "os.abort()", 1),  # a shell around the worker; a library's thread
        ("raise ValueError('mine')", "raise ValueError('first')", 0),
    ],
)
def test_of_plain_workers_the_one_that_was_killed_is_named_and_not_the_one_that_lost_it(
    start: Start, tmp_path: Path, end: str, error: str, culprit: int
) -> None:
    """The survivor's error may well come first: the kernel takes long to end a process of many gigabytes."""
    job = start(options=workers(2), script=script(tmp_path, PEERS.format(end=end, error=error)))
    assert job.wait() == 0, job.output
    (failure,), (incident,) = job.events("failure_detected"), job.events("incident")
    assert failure["rank"] == culprit and f"worker w{culprit}-1" in incident["what"]


def test_a_plain_script_that_keeps_failing_is_given_up(start: Start, tmp_path: Path) -> None:
    failing = script(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(7)\ntime.sleep(600)\n")
    job = start(options=workers(2, "--max-restarts", 1), script=failing)
    assert job.wait() == 1
    assert "exit code 7" in job.output and "restarted 1 times" in job.output


def test_what_a_plain_script_started_ends_with_it(start: Start, tmp_path: Path) -> None:
    parent = script(
        tmp_path,
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n",
    )
    job = start(options=workers(2), script=parent)
    job.until(lambda: job.shown().count("ready") == 2, "both")
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_output_is_kept_apart_and_shown_with_a_prefix(start: Start, tmp_path: Path) -> None:
    talking = script(tmp_path, "import os\nprint('I am', os.environ['RANK'])\nprint('no newline', end='')\n")
    job = start(options=workers(2), script=talking)
    assert job.wait() == 0
    assert "[w0] I am 0" in job.output and "[w1] I am 1" in job.output and "[w1] no newline" in job.output
    assert run("logs", job.run_dir, "w1").stdout == "I am 1\nno newline"
    assert "I am 0" in run("logs", job.run_dir).stdout
    quiet = start(options=workers(2, "--fresh", "--quiet"), script=talking)
    assert quiet.wait() == 0
    assert "I am" not in quiet.output
    assert "I am 0" in run("logs", job.run_dir, "0").stdout


def test_following_the_logs_ends_with_the_run(start: Start) -> None:
    job = start("--steps", 30, options=workers(1, "--quiet"))
    job.until_step(3)
    followed = run("logs", job.run_dir, "-f")
    assert followed.returncode == 0
    assert [line for line in followed.stdout.splitlines() if line.startswith("step 29 of 30")]
    job.finish()


def test_ls_and_status_of_an_ended_run(start: Start, tmp_path: Path) -> None:
    job = start("--steps", 5, options=workers(1))
    job.finish()
    listed = run("ls", tmp_path).stdout
    assert "run" in listed and "finished" in listed and " 4 " in listed
    shown = run("status", job.run_dir).stdout
    assert "finished (exit code 0)" in shown and "step       4" in shown
    missing = run("status", tmp_path / "nothing")
    assert missing.returncode == 2 and "no run" in missing.stderr
    assert run("stop", job.run_dir).returncode == 2


def test_only_what_the_agent_started_is_ended(tmp_path: Path) -> None:
    """An entrypoint script that starts a process beside the job and then becomes the launcher."""
    strangers = tmp_path / "strangers"
    worker = script(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n")
    entrypoint = tmp_path / "entrypoint.sh"
    launch = " ".join(command("launch", "--standalone", "--run-dir", tmp_path / "run", worker))
    entrypoint.write_text(
        f"sleep 600 & echo $! >> {strangers}\n"  # a child
        f"setsid sleep 600 & echo $! >> {strangers}\n"  # in a session of its own
        f"sh -c 'sleep 600 & echo $! >> {strangers}; sleep 0.5' &\n"  # a grandchild whose parent ends during the job
        f"exec {launch}\n"
    )
    with open(tmp_path / "out", "wb") as out:  # a pipe would stay open for as long as a stranger lives
        ended = subprocess.run(["sh", entrypoint], env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    pids = [int(pid) for pid in strangers.read_text().split()]
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and "sleep" in Path(f"/proc/{pid}/comm").read_text()]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert ended.returncode == 0, (tmp_path / "out").read_text()
    assert len(pids) == 3 and alive == pids
    assert not left_behind(tmp_path / "run")
