"""The ranks of a process group: processes that come from one which has imported torch already, since importing it is
what costs time."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from importlib import reload
from multiprocessing.connection import Connection
from typing import Any

import torch

from elastic_harness import failpoints
from elastic_harness.contract import variables

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict", "torch._dynamo"]
)
PATIENCE_S = 120.0


class Rank:
    """One process that runs `main(rank, *arguments)`, in which `rank` is its end of the line to here."""

    def __init__(self, main: Callable[..., None], *arguments: object, fail: str = "") -> None:
        self._line, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_run, args=(main, theirs, fail, arguments))
        self.process.start()
        theirs.close()

    def said(self) -> dict[str, Any]:
        """The next thing it says; nothing if it has ended."""
        assert self._line.poll(PATIENCE_S), "a rank says nothing"
        try:
            said: dict[str, Any] = json.loads(self._line.recv_bytes())
        except (EOFError, ConnectionResetError):
            return {}
        return said

    def kill(self) -> None:
        self.process.kill()

    def let_go(self) -> None:
        """Where it stays it goes on."""
        self._line.close()

    def end(self) -> int:
        """Wait until it has ended; its exit status."""
        self.let_go()
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, "a rank does not end"
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


class Here:
    """A rank's end of the line to the test."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def say(self, **what: object) -> None:
        self._line.send_bytes(json.dumps(what).encode())

    def stay(self) -> None:
        """Until the test lets it end, or has ended itself."""
        self._line.poll(None)


def _run(main: Callable[..., None], line: Connection, fail: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ[variables.FAILPOINTS] = fail
    reload(failpoints)  # which reads it once
    main(Here(line), *arguments)
