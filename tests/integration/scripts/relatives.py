"""A forked worker (its text names elastic_harness) that writes down what can be seen of it and the processes around it.
What differs from launch to launch is left out: numbers of processes and of open files, random marks."""

import contextlib
import gc
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

NUMBERS = re.compile(r"\b[0-9a-f]{16}\b|:\[\d+\]|\b\d{4,}\b")
LOOKS = 20


def main() -> None:
    worker, agent = os.getpid(), os.getppid()
    processes = {"worker": worker, "fork server": fork_server(agent), "agent": agent, "launcher": parent(agent)}
    facts = {name: seen(pid) for name, pid in processes.items()}
    facts["worker"] |= {
        "arguments": [sys.argv, sys.orig_argv, sys.path, str(sys.flags)],
        "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "collection": [gc.isenabled(), gc.get_threshold()],
        "variables": texts(f"{name}={value}" for name, value in os.environ.items()),
    }
    Path(sys.argv[1]).write_text(json.dumps(facts))


def seen(pid: int) -> dict[str, Any]:
    """What /proc tells of a process."""
    place = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    fields = stat(pid)
    return {
        "command": [NUMBERS.sub("#", word) for word in words(place / "cmdline")],
        "environment": texts(words(place / "environ")),
        "signals": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")],
        "group and session": [int(fields[2]) == pid, int(fields[3]) == pid],
        "priority": fields[16],
        "threads": fields[17],
        "umask": status["Umask"].strip(),
        "folder": os.readlink(place / "cwd"),
        "descriptors": min((links(place / "fd") for _ in range(LOOKS)), key=len),  # more for a moment while it forks
        "limits": (place / "limits").read_text(),
    }


def words(path: Path) -> list[str]:
    return [word for word in path.read_text().split("\0") if word]


def texts(variables: Any) -> list[str]:
    return sorted(NUMBERS.sub("#", text) for text in variables)


def links(folder: Path) -> list[str]:
    time.sleep(0.01)
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the listing itself
            found.append(NUMBERS.sub("#", os.readlink(folder / name)))
    return sorted(found)


def fork_server(agent: int) -> int:
    """The agent's oldest child: blanks and workers, which /proc shows alike, come from it."""
    return children(agent)[0]


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent(pid: int) -> int:
    return int(stat(pid)[1])


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


if __name__ == "__main__":
    main()
