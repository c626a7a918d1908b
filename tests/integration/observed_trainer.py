"""The built-in trainer under a test's control, run as a job's script: `observed_trainer.py DIR [trainer arguments]`.

The test says in DIR how far the job may go and where which rank shall fail; the workers write there which faults
happened, which lanes they computed and what they held when they were gone. Training itself is unchanged.

    limit                the steps below this number may begin
    hold                 while it is there no new worker joins
    faults-<step>.json   rules for the members that begin this step: [{id, rank, place, hit, action}]
    joiners.json         rules for workers that have not begun any step yet
    fired-<id>           one line, written once by whoever fired: member and process id
    lanes-<member>, reports-<member>, left-<member>.json

With ALTERNATE_NODES in the environment the exchange takes workers of odd and of even numbers for two nodes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_harness import failpoints
from elastic_harness.contract.wire import as_fields
from elastic_harness.gpt import trainer
from elastic_harness.train import attempt
from elastic_harness.train.link import AgentLink
from elastic_harness.train.partials import Partials
from elastic_harness.train.run import Run, Step

MEMBER = os.environ.get("ELASTIC_HARNESS_MEMBER", "alone")
NAME = MEMBER.replace("/", ".")  # a member of several nodes, as part of a file's name
WHOLE_RUN = ("checkpoint.", "finish.")  # places passed by a background thread or after the last step


class Rules:
    """What `failpoints` consults instead of the rules in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun = False
        self._armed: list[Any] = []

    def begin(self, step: int, rank: int) -> None:
        """The faults that this member is to suffer from here until the next step begins."""
        self.begun = True
        self._armed = [r for r in self._armed if r.place.startswith(WHOLE_RUN)]
        self._armed += [rule for rule in self._read(f"faults-{step}.json") if rule.rank in (rank, None)]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        if not self.begun and not self._armed:
            self._armed = self._read("joiners.json")
        return iter(self._armed)

    def _read(self, name: str) -> list[Any]:
        try:
            found = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return []
        rules = []
        for fault in found:
            rule = failpoints._Rule(fault["place"], None, None, fault["hit"], f"{fault['id']} {fault['action']}")
            rule.rank = fault["rank"]  # type: ignore[attr-defined]
            rules.append(rule)
        return rules


def act_once(folder: Path) -> None:
    """A fault happens to one worker only: whoever creates its file first."""
    act = failpoints._act

    def once(action: str, place: str, step: int | None, values: Any) -> None:
        name, what = action.split()
        try:
            descriptor = os.open(folder / f"fired-{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(descriptor, f"{MEMBER} {os.getpid()}".encode())
        os.close(descriptor)
        act(what, place, step, values)

    failpoints._act = once


def hold_at_steps(folder: Path, rules: Rules) -> None:
    """No step begins before the test allows it."""
    steps = Run.steps

    def held(run: Run) -> Iterator[Step]:
        for step in steps(run):
            while int((folder / "limit").read_text() or 0) <= step.index:
                time.sleep(0.005)
            rules.begin(step.index, run.rank)
            yield step

    Run.steps = held  # type: ignore[method-assign]


def hold_before_joining(folder: Path) -> None:
    """A new worker does not say hello before the test allows it."""
    while (folder / "hold").exists():
        time.sleep(0.005)


def note_lanes(folder: Path) -> None:
    """Write down every lane that was finished here, and what was reported in every recovery."""
    add, report = Partials.add, AgentLink.report

    def note(partials: Partials, node: tuple[int, int], *rest: Any) -> Any:
        with open(folder / f"lanes-{NAME}", "a") as file:
            file.write(json.dumps([partials.step, *node]) + "\n")
        return add(partials, node, *rest)

    def tell(link: AgentLink, said: Any) -> None:
        with open(folder / f"reports-{NAME}", "a") as file:
            file.write(json.dumps(as_fields(said)) + "\n")
        report(link, said)

    Partials.add = note  # type: ignore[method-assign]
    AgentLink.report = tell  # type: ignore[method-assign]


def note_leftovers(folder: Path) -> None:
    """Threads, and sockets beside the one to the agent, that outlive the job in this worker."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                sockets.append(f"{found.family.name} {found.getsockname()} {found.type.name}")
        except OSError:
            continue
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    (folder / f"left-{NAME}.json").write_text(json.dumps({"threads": threads, "sockets": sockets}))


def alternate_nodes() -> None:
    attempt.node_of = lambda member: "even" if int(member[1:].split("-")[0]) % 2 == 0 else "odd"


def main() -> None:
    folder = Path(sys.argv[1])
    rules = Rules(folder)
    failpoints._RULES = rules  # type: ignore[assignment]
    act_once(folder)
    hold_at_steps(folder, rules)
    note_lanes(folder)
    if "ALTERNATE_NODES" in os.environ:
        alternate_nodes()
    hold_before_joining(folder)
    trainer.main(sys.argv[2:])
    note_leftovers(folder)
    sys.stdout.flush()
    os._exit(0)  # a normal exit computes for more than a second


if __name__ == "__main__":
    main()
