"""Workers that send what no worker of ours sends, and a control socket that is asked what nobody asks: each is an error
of that one message."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.agent.control.server import request
from elastic_harness.contract import wire
from elastic_harness.contract.commands import StopRun
from integration.garbling_worker import SAYINGS, frame
from integration.launch_tools import Job, workers

pytestmark = pytest.mark.slow
GARBLING = Path(__file__).with_name("garbling_worker.py")
ENDED_BY_THE_AGENT = range(1, len(SAYINGS) - 1)  # the last one says something odd, in the right form


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as jobs:

        def begin(*arguments: object, **more: Any) -> Job:
            return jobs.enter_context(contextlib.closing(Job(tmp_path / "run", *arguments, **more)))

        yield begin


def test_a_worker_that_sends_garbage_is_a_failed_worker_and_nothing_else_is(start: Callable[..., Job]) -> None:
    job = start(
        *("--steps", 60),
        script=GARBLING,
        options=workers(len(SAYINGS), "--max-workers", len(SAYINGS)),
        variables={"PYTHONPATH": f"{Path(__file__).parents[2] / 'src'}:{Path(__file__).parents[1]}"},
    )
    job.finish()
    assert "the agent died" not in job.output and "Traceback" not in job.output, job.output
    incidents = {e["what"].split()[1]: e["what"] for e in job.events("incident")}
    for index in ENDED_BY_THE_AGENT:
        assert "sent" in incidents[f"w{index}-1"], (SAYINGS[index][:80], incidents)
    assert "generation is '7'; it must be a whole number" in incidents["w6-1"]
    assert r"failed: \ud800" in job.output
    assert not any(name.startswith("w0-") for name in incidents)
    codes = {e["member"]: e["code"] for e in job.events("incident")}
    assert all(codes[f"w{index}-1"] == "EH-W110" for index in ENDED_BY_THE_AGENT), codes


def ask(path: str, *frames: bytes) -> list[wire.Message]:
    """What is answered to these frames, sent at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(path)
        sock.sendall(b"".join(frames))
        channel = wire.Channel(sock)
        return [channel.receive() for _ in frames]


def test_the_control_socket_answers_what_it_cannot_make_sense_of(start: Callable[..., Job]) -> None:
    job = start("--steps", 100000, options=workers(1))
    job.until_step(1)
    control = job.record()["control"]
    odd = [
        *(b"[]", b"7", b"null", b"", b"{", b"\xff", b"[" * 200_000, b'{"command": ["stop"]}', b'{"command": "scale"}'),
        *(b'{"command": "scale", "workers": "2"}', b'{"command": "scale", "workers": %d}' % 10**400),
        *(b'{"command": "kill", "worker": {}}', b'{"command": "kill", "worker": "../../w0"}'),
        json.dumps({"command": "\ud800"}).encode(),
    ]
    answers = ask(control, *map(frame, odd), frame(b'{"command": "status"}'))
    assert all(answer["exit_code"] == 2 for answer in answers[:-1]), answers
    assert "must be a whole number" in answers[9]["error"]
    assert answers[-1]["status"] == "running"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:  # a frame that is longer than any
        sock.settimeout(10)
        sock.connect(control)
        sock.sendall(b"\xff" * 16)
        assert sock.recv(1) == b""
    (answer,) = ask(control, frame(b'{"command": "statsu"}'))
    assert "unknown command 'statsu'; this agent knows status, stop, scale, drain, audit, kill" in answer["error"]
    request(control, StopRun())
    assert job.wait() == 143
    assert "the agent died" not in job.output and "Traceback" not in job.output, job.output
