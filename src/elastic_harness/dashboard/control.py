"""What a page may ask a live run for: the same commands as of the command line, over the same socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.agent.control.server import request
from elastic_harness.contract.commands import DrainNode, GetStatus, KillWorker, ScaleRun, StopRun
from elastic_harness.errors import ConfigError
from elastic_harness.runs import folder as folders

NAMES = ("kill", "add", "drain", "stop")


def carry_out(paths: Sequence[Path], order: Mapping[str, Any]) -> str:
    """Ask a run's agent for what a page asked for, and return what was done, in words. With several nodes here the one
    is asked that is named. Raises HarnessError, with the agent's reason if it refuses."""
    name, worker = order.get("command"), order.get("worker")
    socket = folders.control_of(_folder(paths, order.get("node")))
    if name == "kill":
        if not isinstance(worker, str) or not worker:
            raise ConfigError("kill which worker? Name a member (w1-2), a place (w1) or a rank (rank0)")
        killed = request(socket, KillWorker(worker))
        return f"killed {killed['killed']} (rank {killed['rank']}, pid {killed['pid']})"
    if name == "add":
        wanted = request(socket, GetStatus()).get("target")
        if not isinstance(wanted, int):
            raise ConfigError("this run cannot be scaled: its script does not use elastic_harness.start()")
        return f"scaling to {request(socket, ScaleRun(wanted + 1))['target']} workers"
    if name == "drain":
        request(socket, DrainNode(""))
        return "draining: this node leaves at the next step boundary"
    if name == "stop":
        request(socket, StopRun())
        return "stopping at the next step boundary, with a checkpoint"
    raise ConfigError(f"the command is {str(name)[:50]!r}; it must be one of {', '.join(NAMES)}")


def _folder(paths: Sequence[Path], node: object) -> Path:
    if node in (None, ""):
        return paths[0]
    found = [path for path in paths if path.name.partition("@")[2] == node]
    if not found:
        raise ConfigError(f"no node {str(node)[:50]!r} of this run is on this machine")
    return found[0]
