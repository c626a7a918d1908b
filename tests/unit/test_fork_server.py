"""Workers that are forked: they are what `python` would have started, and nothing is shared that must not be."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_harness import processes
from elastic_harness.agent.workers import forks
from elastic_harness.agent.workers.forks import Blank, ForkServer, uses_our_api
from elastic_harness.agent.workers.process import Process

PATIENCE_S = 60.0
FIGURES = """
import json, os, random, sys
def state():
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "name": __name__, "file": __file__,
        "main": sys.modules["__main__"].__dict__ is globals(), "cwd": os.getcwd(),
        "environment": {k: v for k, v in os.environ.items() if k not in ("_", "SHLVL")},
        "stdin": sys.stdin.read(), "stdout": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through],
        "spec": getattr(__spec__, "name", None), "threads": len(os.listdir("/proc/self/task")),
        "interrupt": __import__("signal").getsignal(2) is __import__("signal").default_int_handler,
    }
if __name__ == "__main__":
    print(json.dumps(state()))
"""
SCARCE = """
import errno, os
fork, server = os.fork, os.getpid()
def scarce():
    if os.path.exists({full!r}) and (os.getpid() == server) == ({which} == 0):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = scarce
"""
MORTAL = """
import os, signal, sys
server = sys.modules["__main__"]
become = server._become_child_of
def die(agent_pid):
    if os.path.exists({deadly!r}):
        os.unlink({deadly!r})
        os.kill(os.getpid(), signal.SIGKILL)
    become(agent_pid)
server._become_child_of = die
"""

SLEEPY = """
import os, sys, time
server = sys.modules["__main__"]
become = server._become_child_of
def sleep(agent_pid):
    become(agent_pid)
    if os.path.exists({slow!r}):
        os.unlink({slow!r})
        time.sleep(600)
server._become_child_of = sleep
"""


class Loop:
    """An event loop as the agent has one, around a fork server that imports little."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        self.selector = selectors.DefaultSelector()
        self.told: list[str] = []
        self.server = ForkServer(folder, self.listen, self.told.append)

    def listen(self, descriptor: int, mask: int, call: Callable[[int], None] | None) -> None:
        if call is not None:
            self.selector.register(descriptor, mask, call)
        else:
            with contextlib.suppress(KeyError):
                self.selector.unregister(descriptor)

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"waited for {what}; told {self.told}"
            self.server.tick()
            for key, mask in self.selector.select(0.05):
                if key.fd in self.selector.get_map():
                    key.data(mask)

    def blank(self) -> Blank:
        self.until(lambda: not self.server.preparing, "a blank")
        blank = self.server.take()
        assert blank is not None, self.told
        return blank

    def run(self, *command: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A program in a blank, to its end."""
        read, write = os.pipe()
        blank = self.blank()
        arguments = [sys.executable, *map(str, command)]
        process = blank.order(arguments, environment or dict(os.environ), {}, output=write, niceness=0)
        os.close(write)
        with open(read) as output:
            text = output.read()
        return subprocess.CompletedProcess(arguments, process.wait(), text)


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(forks, "BASE", ("json", "decimal"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    processes.become_child_subreaper()
    loop = Loop(tmp_path)
    try:
        yield loop
    finally:
        loop.server.close()
        loop.selector.close()


def start(loop: Loop, *modules: str, path: Path | None = None, wanted: int = 1) -> None:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    if modules:
        loop.server._modules = list(modules)
    loop.server.start(environment, wanted)


def cold(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("as_module", [False, True])
def test_a_forked_program_finds_what_python_would_give_it(
    as_module: bool, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "figures.py"
    script.write_text(FIGURES)
    monkeypatch.chdir(tmp_path)
    command = ("-m", "figures", "--lr", "3") if as_module else (script, "--lr", "3")
    start(loop)
    forked, started = loop.run(*command), cold(*command)
    assert forked.returncode == started.returncode == 0, forked.stdout
    assert json.loads(forked.stdout) == json.loads(started.stdout)


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('of the user')",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a reason')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()",
        "import atexit; atexit.register(print, 'at the end')",
        "def f(:",
        "import does_not_exist",
    ],
)
def test_a_forked_program_ends_as_it_would_under_python(body: str, loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(body + "\n")
    start(loop)
    forked, started = loop.run(script), cold(script)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)


def test_a_script_that_is_not_there_is_said_as_python_says_it(loop: Loop, tmp_path: Path) -> None:
    start(loop)
    forked, started = loop.run(tmp_path / "gone.py"), cold(tmp_path / "gone.py")
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)


def test_settings_that_come_after_torch_are_noticed(loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.environ['OMP_NUM_THREADS'] = '7'; os.environ['OTHER'] = '1'\n"
        "from elastic_harness.train.imports import late_settings; print(late_settings())\n"
    )
    start(loop)
    environment = {**os.environ, "LOCAL_RANK": "0"}
    assert loop.run(script, environment=environment).stdout == "['OMP_NUM_THREADS']\n"
    alone = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert alone.stdout == "[]\n", "there it is in time"


def test_only_the_named_descriptors_are_inherited(loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "named = [int(n) for n in os.environ['NAMED'].split(',')]\n"
        "print(sorted(os.readlink(f'/proc/self/fd/{n}') for n in named))\n"
        "rest = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n.isdigit()\n"
        "        and int(n) > 2 and int(n) not in named and os.path.exists(f'/proc/self/fd/{n}')]\n"
        "print([what for what in rest if not what.startswith('/proc/')])\n"
    )
    first, second = os.memfd_create("first"), os.memfd_create("second")
    read, write = os.pipe()
    start(loop)
    process = loop.blank().order(
        [sys.executable, str(script)], dict(os.environ), {"NAMED": [first, second]}, output=write, niceness=0
    )
    for descriptor in (first, second, write):
        os.close(descriptor)
    with open(read) as output:
        named, rest = output.read().splitlines()
    assert process.wait() == 0
    assert "memfd:first" in named and "memfd:second" in named
    assert rest == "[]"


def test_what_is_imported_is_there_already_and_random_numbers_are_each_process_s_own(
    loop: Loop, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, random\n"
        "loaded = 'numpy' in sys.modules\n"
        "import numpy\n"
        "print(loaded, random.random(), numpy.random.rand())\n"
    )
    start(loop, "numpy", wanted=2)
    first, second = (loop.run(script).stdout.split() for _ in range(2))
    assert first[0] == second[0] == "True"
    assert first[1] != second[1] and first[2] != second[2]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 thread"),
        ("import socket\nopened = socket.create_server(('127.0.0.1', 0))", "it opens socket:"),
        ("import random\nrandom.random()", "random numbers of random"),
        ("import subprocess\nsubprocess.Popen(['sleep', '60'])", "starts a process"),
        ("import os\nopened = os.eventfd(0)  # as a driver of a device has them", "it opens anon_inode:"),
    ],
)
def test_a_module_that_leaves_something_behind_is_left_out(body: str, why: str, loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "unsafe.py").write_text(body + "\n")
    (tmp_path / "harmless.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('unsafe' in sys.modules, 'harmless' in sys.modules)\n")
    start(loop, "unsafe", "harmless", path=tmp_path)
    assert loop.run(script).stdout == "False True\n"
    assert any("leaves out unsafe" in text and why in text for text in loop.told)
    known = json.loads((tmp_path / forks.IMPORTS).read_text())
    assert why in known["not_preloaded"]["unsafe"], "the next launch need not find out"


def test_what_needs_an_unsafe_module_does_not_cost_a_server_each(loop: Loop, tmp_path: Path) -> None:
    """As datasets, and all that imports it, bring back the thread of pyarrow."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "unsafe.py").write_text(thread)
    (tmp_path / "harmless.py").write_text("")
    needing = [f"needs_{number}" for number in range(12)]
    for name in needing:
        (tmp_path / f"{name}.py").write_text("import unsafe\n")
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('unsafe' in sys.modules, 'harmless' in sys.modules)\n")
    start(loop, "harmless", "unsafe", *needing, path=tmp_path)
    assert loop.run(script).stdout == "False True\n"
    assert len([text for text in loop.told if "leaves out" in text]) == 2, loop.told


def test_a_changed_file_means_a_fresh_server(loop: Loop, tmp_path: Path) -> None:
    module, script = tmp_path / "changing.py", tmp_path / "script.py"
    module.write_text("VALUE = 1\n")
    script.write_text("import changing; print(changing.VALUE)\n")
    start(loop, "changing", path=tmp_path)
    assert loop.run(script).stdout == "1\n"
    loop.until(lambda: not loop.server.preparing, "a blank of the old server")
    module.write_text("VALUE = 'other'\n")
    assert loop.server.take() is None and loop.server.preparing
    assert loop.run(script).stdout == "other\n"


def test_what_a_worker_has_imported_is_imported_for_the_next(loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('numpy' in sys.modules)\n")
    start(loop)
    assert loop.run(script).stdout == "False\n"
    loop.server.learn(["json", "numpy", "no_such_module"])
    assert loop.run(script).stdout == "True\n"
    assert "numpy" in json.loads((tmp_path / forks.IMPORTS).read_text())["modules"]


def test_what_is_learned_late_has_as_much_time_as_the_first_imports(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('numpy' in sys.modules)\n")
    start(loop)
    loop.until(lambda: not loop.server.preparing, "a blank")
    an_hour_later = time.monotonic() + 3600
    monkeypatch.setattr(forks.time, "monotonic", lambda: an_hour_later)
    loop.server.learn(["numpy"])
    loop.server.tick()
    monkeypatch.undo()
    monkeypatch.setattr(forks, "BASE", ("json", "decimal"))
    assert not loop.told and loop.server.preparing
    assert loop.run(script).stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the server", "what it forks"])
def test_one_that_does_not_answer_is_replaced(
    what: str, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, slow = tmp_path / "script.py", tmp_path / "slow"
    script.write_text("print('here')\n")
    (tmp_path / "sleepy.py").write_text(SLEEPY.format(slow=str(slow)))
    start(loop, "sleepy", path=tmp_path)
    loop.until(lambda: not loop.server.preparing, "a blank")
    monkeypatch.setattr(forks, "FORK_LIMIT_S", 1.0)
    first = loop.server._process
    assert first is not None
    if what == "the server":
        first.send_signal(signal.SIGSTOP)
    else:
        slow.touch()
    assert loop.run(script).stdout == "here\n"  # a blank that was ready; its successor is asked for
    if what == "what it forks":
        loop.until(lambda: not slow.exists(), "that one was forked which does nothing")
    assert loop.run(script).stdout == "here\n"
    assert (loop.server._process is not first) == (what == "the server")


def test_restarts_long_ago_do_not_count(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "RESTARTS_MAX", 1)
    monkeypatch.setattr(forks, "CALM_S", 0.0)
    start(loop)
    for _ in range(4):
        loop.until(lambda: not loop.server.preparing, "a blank")
        assert loop.server._process is not None, loop.told
        loop.server._process.kill()
        told = len(loop.told)
        loop.until(lambda told=told: len(loop.told) > told, "that it is noticed")
    assert not any("without the fork server" in text for text in loop.told)


def test_a_server_that_dies_is_started_again(loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")
    start(loop)
    loop.until(lambda: not loop.server.preparing, "a blank")
    assert loop.server._process is not None
    loop.server._process.kill()
    loop.until(lambda: loop.told, "that it is noticed")
    assert loop.run(script).stdout == "here\n"


def test_a_blank_that_dies_is_replaced(loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")
    start(loop)
    loop.until(lambda: not loop.server.preparing, "a blank")
    (blank,) = loop.server._blanks
    assert isinstance(blank.process, Process)
    os.kill(blank.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, blank.process.pid, os.WEXITED | os.WNOWAIT)
    assert loop.run(script).stdout == "here\n"


def test_a_server_that_cannot_start_is_done_without(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "RESTARTS_MAX", 2)
    (tmp_path / "decimal.py").write_text("import os; os._exit(9)\n")
    start(loop, path=tmp_path)
    loop.until(lambda: loop.server._process is None, "that it is given up")
    assert not loop.server.preparing and loop.server.take() is None
    assert "workers start without the fork server" in loop.told[-1]


@pytest.mark.parametrize("which", [0, 1], ids=["the server", "the one in between"])
def test_a_full_process_table_is_waited_out(
    which: int, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are not waited for meanwhile: they are started as ever, or that fails as ever."""
    monkeypatch.setattr(forks, "REFUSED_S", 0.2)
    full, script = tmp_path / "full", tmp_path / "script.py"
    full.touch()
    script.write_text("print('here')\n")
    (tmp_path / "scarce.py").write_text(SCARCE.format(full=str(full), which=which))
    start(loop, "scarce", path=tmp_path)
    loop.until(lambda: len(loop.told) >= 2, "that it is said twice")
    assert all("cannot fork: Resource temporarily unavailable" in told for told in loop.told)
    assert not loop.server.preparing and loop.server.take() is None
    assert loop.server._process is not None, "the server lives"
    full.unlink()
    loop.until(lambda: loop.server.ready, "a blank")
    assert loop.run(script).stdout == "here\n"


def test_a_child_that_dies_before_it_has_told_its_pid_is_replaced(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a moment: what killed it may kill the next one."""
    monkeypatch.setattr(forks, "REFUSED_S", 0.2)
    deadly, script = tmp_path / "deadly", tmp_path / "script.py"
    deadly.touch()
    script.write_text("print('here')\n")
    (tmp_path / "mortal.py").write_text(MORTAL.format(deadly=str(deadly)))
    start(loop, "mortal", path=tmp_path)
    loop.until(lambda: not deadly.exists() and not loop.server.preparing, "its death to be noticed")
    loop.until(lambda: loop.server.ready, "another one")
    assert loop.run(script).stdout == "here\n"
    assert not [told for told in loop.told if "ended" in told]


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_forks_leaves_nothing(loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")
    before = set(processes.children())
    start(loop)
    for after_s in (0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032):
        loop.until(lambda: loop.server._ready, "a server")
        said = len(loop.told)
        loop.server.keep(9)
        time.sleep(after_s)
        assert loop.server._process is not None
        loop.server._process.kill()
        loop.until(lambda n=said: len(loop.told) > n, "that it is noticed")
        for blank in list(loop.server._blanks):
            loop.server._drop(blank)
    loop.server.keep(1)
    assert loop.run(script).stdout == "here\n"
    loop.server.close()

    def left() -> set[int]:
        forks.reap_orphans(())
        return set(processes.children()) - before

    loop.until(lambda: not left(), "the end of the blanks whose server died before it could tell of them")


@pytest.mark.slow
def test_fifty_in_a_row_leave_nothing(loop: Loop, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")

    def used() -> tuple[int, int, int]:
        pids = (os.getpid(), loop.server._process.pid) if loop.server._process is not None else ()
        agent, server = (len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        return agent, server, len(processes.children())

    start(loop)
    assert loop.run(script).stdout == "here\n"
    loop.until(lambda: loop.server.ready, "the next blank")
    time.sleep(0.1)  # it may not have closed its end yet
    first = used()
    for _ in range(50):
        assert loop.run(script).stdout == "here\n"
        loop.until(lambda: loop.server.ready, "the next blank")
    loop.until(lambda: used() == first, f"no more descriptors and children than {first}")
    assert loop.told == []


def test_nothing_is_left(loop: Loop) -> None:
    start(loop, wanted=3)
    loop.until(lambda: len([b for b in loop.server._blanks if b.ready]) == 3, "three blanks")
    pids = loop.server.pids
    assert len(pids) == 4
    loop.server.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert len(loop.selector.get_map()) == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"modules": 3, "not_preloaded": {}}', '{"modules": [[]]}'])
def test_a_damaged_note_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / "imports.json").write_text(content)
    assert forks._read(tmp_path / "imports.json") == {}


def test_who_is_forked(tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours.py", tmp_path / "plain.py"
    ours.write_text("import elastic_harness\n")
    plain.write_text("import torch\n")
    assert uses_our_api([sys.executable, str(ours)], None)
    assert uses_our_api([sys.executable, "-m", "elastic_harness.train"], None)
    assert uses_our_api([sys.executable, str(plain)], "elastic"), "an earlier launch has seen it say hello"
    assert not uses_our_api([sys.executable, str(plain)], None)
    assert not uses_our_api(["/bin/sh", str(ours)], "elastic")
    assert not uses_our_api([sys.executable, str(tmp_path / "gone.py")], None)
