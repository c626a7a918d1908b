"""Ends what an agent left behind, and only that.

The launcher adopts orphans, including those of others: of the shell whose place it took (`exec elastic-harness
launch`), or of anything else in a container in which it is the first process. It ends the processes that its agents
started, and no other.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from elastic_harness.contract import variables
from elastic_harness.processes import children


class Orphans:
    """Knows what this process's agents started. It knows them by their sessions, and by a mark in the environment if
    they have begun their own session. A process that has done so with another environment is not known, and is left
    alone."""

    def __init__(self) -> None:
        self._mark = os.urandom(8).hex()
        self._sessions: set[int] = set()

    def environment(self) -> dict[str, str]:
        """Return the environment to start an agent with."""
        around = os.environ.get(variables.LAUNCHERS, "")
        return {**os.environ, variables.LAUNCHERS: f"{around}:{self._mark}" if around else self._mark}

    def adopt(self, session: int) -> None:
        """Note that processes of this session belong to an agent."""
        self._sessions.add(session)

    def end(self) -> None:
        """Kill and reap every process that a dead agent left. All are children of this process, the subreaper."""
        while ours := [pid for pid in children() if self._is_ours(pid)]:
            for pid in ours:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in ours:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            if os.getsid(pid) in self._sessions:
                return True
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == variables.LAUNCHERS.encode():
                    return self._mark.encode() in value.split(b":")
        return False
