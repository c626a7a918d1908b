"""A worker's environment: torchrun's variables, and ours."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from elastic_harness.contract import variables


@dataclass(frozen=True)
class JobEnvironment:
    """The part of the environment that all workers of one start have in common. `restart_count` counts restarts of the
    job as a whole."""

    run_id: str
    run_dir: Path
    workers: int
    max_restarts: int
    restart_count: int
    master_port: int
    host: str | None = None

    def of(self, index: int) -> dict[str, str]:
        """Return the environment of the worker at a local index. RANK is provisional for members of an elastic run."""
        rank, size = str(index), str(self.workers)
        environment = base_environment()
        environment.update(
            RANK=rank,
            LOCAL_RANK=rank,
            ROLE_RANK=rank,
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            ROLE_WORLD_SIZE=size,
            GROUP_RANK="0",
            GROUP_WORLD_SIZE="1",
            NODE_RANK="0",
            ROLE_NAME="default",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.master_port),
            TORCHELASTIC_RUN_ID=self.run_id,
            TORCHELASTIC_RESTART_COUNT=str(self.restart_count),
            TORCHELASTIC_MAX_RESTARTS=str(self.max_restarts),
            TORCHELASTIC_USE_AGENT_STORE="False",
        )
        environment |= {variables.RUN_DIR: str(self.run_dir), variables.RUN_ID: self.run_id}
        if self.host is not None:
            environment[variables.HOST] = self.host
        return environment


def base_environment() -> dict[str, str]:
    """Return the environment that every process of a node gets, whichever worker it is."""
    environment = dict(os.environ)
    environment.pop(variables.ETCD_PASSWORD, None)  # the store is the agent's alone
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def free_port() -> int:
    """Return a TCP port on which no process listens now. It is never one of an earlier start, whose peers may still
    dial it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
