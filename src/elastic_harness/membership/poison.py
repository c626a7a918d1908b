"""Decides whether a slot is to blame for the workers that failed in it. Pure.

A slot that fails wherever it is computed would end one worker and spare after another, so the job has to stop. A death
alone proves nothing about the slot. Preemptions and operators kill workers too, and it is chance which slot a worker
computes at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from elastic_harness.exits import Exit

How = Literal["error", "memory", "overdue", "killed"]
"""error: an exception or a crash of the worker itself. memory: the kernel ended the worker for memory, or the worker
itself ended because it could get none. overdue: the worker did not finish within the longest deadline that is allowed.
killed: by SIGKILL, nobody knows why."""
Failure = tuple[int, int, str, How]
"""Step, slot, member, how."""

FOR_MEMORY = "there was not enough memory for it"
ERRORS = 2  # members that fail in a slot by themselves before the slot is blamed
OUT_OF_MEMORY = 2  # … that end for want of memory, more than do so in other slots of the step
EVIDENT = 3  # … that fail in any of these ways, or do not finish in time
KILLS = 10  # … that are killed, nobody knows why, more than are killed in other slots of the step


def evidence(end: Exit, *, for_memory: bool) -> How | None:
    """Return what the end of a worker, which was computing a slot, says about that slot; None: nothing."""
    if end is Exit.ENDED:
        return None
    if end is Exit.KILLED:
        return "memory" if for_memory else "killed"
    return "error"


def blame(failures: Iterable[Failure], step: int, slot: int, overdue_s: float) -> tuple[tuple[str, ...], str]:
    """Return the members whose failures prove that this slot is at fault, and the reason. Without a proof there are no
    members. `overdue_s`: the longest deadline that was missed in this step."""
    in_step = [(j, member, how) for s, j, member, how in failures if s == step]
    here = {member: how for j, member, how in in_step if j == slot}
    errors = {member for member, how in here.items() if how == "error"}
    evident = {member for member, how in here.items() if how != "killed"}
    hungry = {member for member, how in here.items() if how == "memory"}
    killed = here.keys() - evident
    # Kills in other slots of the step speak for an operator, a preemption or a full machine, not for the slot.
    elsewhere = {member for j, member, how in in_step if j != slot and how == "killed"}
    hungry_elsewhere = {member for j, member, how in in_step if j != slot and how == "memory"}
    words: dict[How, str] = {
        "error": "it failed by itself",
        "memory": FOR_MEMORY,
        "overdue": f"it did not finish within {overdue_s:g} s, as long as elastic.progress_timeout_max_s and "
        "elastic.first_step_timeout_s allow",
    }
    if len(errors) >= ERRORS:
        return tuple(sorted(here)), "it failed by itself"
    if len(hungry) - len(hungry_elsewhere) >= OUT_OF_MEMORY:
        return tuple(sorted(here)), words["memory"]
    if len(evident) >= EVIDENT:
        return tuple(sorted(here)), " or ".join(words[how] for how in dict.fromkeys(here[m] for m in sorted(evident)))
    if len(killed) - len(elsewhere) >= KILLS:
        return tuple(sorted(here)), "each was killed while it computed this slot, nobody knows by whom"
    return (), "the slot is not proved to be at fault"
