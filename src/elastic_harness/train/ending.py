"""The end of a run before `training.max_steps`, by the script's own decision: `run.stop`, and what `break` is not.

A worker that asks says so in its header of the step, so whoever commits that step knows that it was the last one: from
the headers, or from the record that a laggard replays. Its agent hears of it too and passes it on, so the request
outlives the worker that made it.
"""

from __future__ import annotations

import dis
from types import FrameType

from elastic_harness.contract.messages import EndAsked

_DROPS = frozenset({"POP_TOP", "POP_ITER"})  # how `break` and `return` let go of what a loop iterates over


def ends(asked: EndAsked | None, step: int) -> bool:
    """Whether a step is to be the last one. A step before the asked one is done again after a restore, and is not."""
    return asked is not None and step >= asked.step


def left_by_hand(frame: FrameType | None) -> bool:
    """Whether the code that has just let go of an iterator did so by `break` or `return`, not because an exception is
    on its way: that one is not visible here, but the instruction which raised it is."""
    return frame is not None and frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] in _DROPS


def left_message(version: int, max_steps: int, *, committed: bool) -> str:
    """What to say to a script that leaves the loop before its end."""
    where = f"after {version}" if committed else f"in the middle of step {version}, after {version}"
    return (
        f"the loop over run.steps() was left by break or return {where} of {max_steps} steps, which does not end the "
        'run. To end it early call run.stop("why") in that place and let the loop go on: it ends by itself after the '
        "next step, on all workers alike"
    )
