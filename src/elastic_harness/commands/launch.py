"""`elastic-harness launch`: prepares the run folder, then stays as the small parent that keeps an agent running.

The parent knows nothing of the training. It copies the agent's output to the terminal, passes signals on, starts a new
agent if one dies by itself, and ends with the agent's exit code. The processes that a dead agent leaves behind become
the parent's children. The parent ends them before it starts the next agent (`orphans`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from elastic_harness.agent.options import LaunchRequest, parse
from elastic_harness.agent.reporting.incident import signal_name
from elastic_harness.agent.workers.orphans import Orphans
from elastic_harness.agent.workers.script import check_command
from elastic_harness.commands.beside import ended_after, run_beside
from elastic_harness.contract import shared_frames
from elastic_harness.errors import EXIT_INFRASTRUCTURE, EXIT_TERMINATED, ConfigError, InfrastructureError
from elastic_harness.names import TRAINER
from elastic_harness.processes import become_child_subreaper, children, die_with_parent
from elastic_harness.runs import folder as folders
from elastic_harness.runs import origin as origins
from elastic_harness.runs.named import RUNS
from elastic_harness.tracking import trackers

AGENT_RESTARTS_MAX = 10
AGENT_RESTARTS_WINDOW_S = 3600.0
DASHBOARD_END_S = 3.0
_KNOWN_EXITS = frozenset({0, 1, 2, 3, 4, 129, 130, 143})
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Launch a job, stay until it ends, and return its exit code."""
    return launch(parse(argv), argv)


def launch(request: LaunchRequest, argv: Sequence[str]) -> int:
    check_command(request.options.command)
    _check_notice_file(request.options.notice_file)
    request = _heed_trainer(request)
    trackers.check(request.trackers)
    request = _for_several_nodes(request)
    run_id = request.run_id or (Path(request.run_dir).resolve().name if request.run_dir else folders.new_run_id())
    node = "" if request.options.store is None else f"@{request.options.node_name}"
    path = Path(request.run_dir) if request.run_dir else RUNS / f"{run_id}{node}"
    path = Path(os.path.abspath(path))  # its last part names the run, so no ".." may stand there
    lock = folders.acquire(path)
    try:
        if request.fresh and (path / folders.RECORD).exists():
            moved = folders.set_aside(path)
            os.close(lock)
            lock = folders.acquire(path)
            print(f"[launch] the earlier run was moved to {moved}", flush=True)
        if request.fresh and request.options.store is not None:
            from elastic_harness.agent.decisions.store_view import forget

            print(f"[launch] {forget(request.options)}", flush=True)
        if request.origin is not None:
            origin = origins.claim(path, request.origin, weights_only=request.weights_only)
            print(f"[launch] {'the weights' if origin.weights_only else 'the state'} of {origin}", flush=True)
        folder = folders.RunFolder(path)
        resumed = bool(folder.record)
        if folder.record.get("options", {}).get("command") != list(request.options.command):
            folder.record.pop("mode", None)
        folder.update(
            run_id=folder.record.get("run_id", run_id),
            argv=list(argv),
            cwd=os.getcwd(),
            created=folder.record.get("created", time.time()),
            launcher_pid=os.getpid(),
            options=request.options.to_json(),
            status="starting",
        )
        for note in request.notes:
            print(f"[launch] note: {note}", flush=True)
        print(f"[launch] {'resuming' if resumed else 'new'} run {folder.record['run_id']} in {path}", flush=True)
        with contextlib.ExitStack() as followers:
            for words in _followers(request):
                followers.enter_context(run_beside(words[0], str(path), *words[1:]))
            if request.dashboard:
                followers.enter_context(_dashboard(path))
            return _Parent(path, lock).run()
    finally:
        os.close(lock)


def _followers(request: LaunchRequest) -> Iterator[tuple[str, ...]]:
    """Yield the commands that follow the run from beside it, each without the run."""
    if request.metrics_file is not None:
        yield "metrics", "--file", os.path.abspath(request.metrics_file)
    if request.trackers:
        yield "track", *request.trackers


def _heed_trainer(request: LaunchRequest) -> LaunchRequest:
    """Say what is wrong with the built-in trainer's settings once, before any worker starts. Return the request with
    the trackers that these settings name, and with `elastic.min_workers`, unless --min-workers asks for more. Raises
    ConfigError."""
    options = request.options
    if tuple(options.command[1:3]) != ("-m", TRAINER):
        return request
    from elastic_harness.gpt import command_line

    config = command_line.check(options.command[3:])
    least = max(options.min_workers, config.elastic.min_workers)
    if least > (options.workers if options.store is None else options.max_workers):
        raise ConfigError(f"elastic.min_workers is {least}, but there will be {options.workers} workers; start more")
    trackers = tuple(dict.fromkeys((*request.trackers, *config.trainer.tracking)))
    return replace(request, options=replace(options, min_workers=least), trackers=trackers)


def _check_notice_file(path: str | None) -> None:
    """Refuse a notice that is there already, because the node would leave as soon as it has come."""
    if path is not None and os.path.exists(path):
        raise ConfigError(f"--notice-file {path} is there already, so this node would be drained at once; remove it")


def _for_several_nodes(request: LaunchRequest) -> LaunchRequest:
    """Return the request with what this machine knows of itself. Raises ConfigError before anything is begun."""
    options = request.options
    if options.store is None:
        return request
    from elastic_harness.agent.decisions.own_address import own_address
    from elastic_harness.etcd import gateway

    host = own_address(options.host, gateway.Address.parse(options.store).endpoints)
    name = options.node_name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:100] or "node"
    return replace(request, options=replace(options, host=host, node_name=name))


@contextlib.contextmanager
def _dashboard(path: Path) -> Iterator[None]:
    """Show the run on a page while inside. If the page fails, the run goes on without it."""
    parent = os.getpid()
    try:
        page = subprocess.Popen(
            [sys.executable, "-m", "elastic_harness", "dashboard", str(path)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )
    except OSError as error:
        print(f"[launch] the page cannot be started ({error.strerror or error}); the run goes on", flush=True)
        yield
        return
    with ended_after(page, DASHBOARD_END_S):
        yield


class _Parent:
    def __init__(self, path: Path, lock: int) -> None:
        self._path = path
        self._lock = lock
        self._frames = shared_frames.create()  # made here, so that they outlive an agent
        self._agent: subprocess.Popen[bytes] | None = None
        self._orphans = Orphans()
        self._signalled = 0
        self._starts: deque[float] = deque()

    def run(self) -> int:
        become_child_subreaper()
        previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._reap_orphans)
        try:
            while True:
                code = self._run_agent()
                self._orphans.end()
                if code in _KNOWN_EXITS:
                    return code
                if self._signalled:
                    return 128 + self._signalled
                if (folders.read_record(self._path) or {}).get("status") == "draining":
                    print(f"[launch] the agent died ({_describe(code)}) while this node was drained", flush=True)
                    self._mark_ended("stopped", EXIT_TERMINATED)
                    return EXIT_TERMINATED
                if not self._may_restart():
                    self._mark_ended("failed", EXIT_INFRASTRUCTURE)
                    raise InfrastructureError(
                        f"the agent died {len(self._starts)} times within an hour (last: "
                        f"{_describe(code)}); see {self._path / 'logs' / 'agent.log'}, then launch again to resume"
                    )
                time.sleep(min(5.0, 0.1 * 2 ** (len(self._starts) - 1)) if len(self._starts) > 1 else 0.0)
                print(
                    f"[launch] the agent died by itself ({_describe(code)}) and took its workers along; starting a new "
                    f"one ({len(self._starts)} of at most {AGENT_RESTARTS_MAX} restarts an hour)",
                    flush=True,
                )
        finally:
            if self._agent is not None and self._agent.poll() is None:
                self._agent.kill()
                self._agent.wait()
            self._orphans.end()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_agent(self) -> int:
        parent = os.getpid()
        command = [sys.executable, "-m", "elastic_harness.agent", "--run-dir", str(self._path), "--parent", str(parent)]
        command += ["--frames", shared_frames.to_text(self._frames), "--lock", str(self._lock)]
        if _colour():
            command.append("--colour")

        self._agent = None
        try:
            agent = subprocess.Popen(
                command,
                env=self._orphans.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(self._lock, *self._frames),
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
            )
        except OSError as error:
            raise InfrastructureError(f"cannot start the agent: {error.strerror or error}") from error
        self._agent = agent
        self._orphans.adopt(agent.pid)
        if self._signalled:
            agent.send_signal(self._signalled)
        assert agent.stdout is not None
        with agent.stdout as output:
            while data := os.read(output.fileno(), 1 << 16):
                _show(data)
        return agent.wait()

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._signalled = number
        agent = self._agent
        if agent is not None and agent.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, number)

    def _reap_orphans(self, _number: int, _frame: FrameType | None) -> None:
        """Reap the processes that ended workers had started. They become this process's children, and would stay as
        zombies."""
        for pid in children():
            if self._agent is not None and pid != self._agent.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > AGENT_RESTARTS_WINDOW_S:
            self._starts.popleft()
        if len(self._starts) >= AGENT_RESTARTS_MAX:
            return False
        self._starts.append(now)
        return True

    def _mark_ended(self, status: str, exit_code: int) -> None:
        with contextlib.suppress(InfrastructureError):
            folders.RunFolder(self._path).update(status=status, exit_code=exit_code, agent_pid=None, control=None)


def _show(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _describe(code: int) -> str:
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
