"""A script's wish to end the run (`run.stop`), as the agent keeps it: for workers and nodes that have not heard of it.

The worker that asks tells the others itself, in the header of the step. The agent's copy matters when that worker dies
before it could.
"""

from __future__ import annotations

import json
from typing import Any

from elastic_harness.messages import TO_AGENT, check
from elastic_harness.wire import Malformed, Message

KEY = "stop_asked"  # in the values of a generation, through which nodes tell each other


class ScriptStop:
    """The earliest step after which a script wants the run to end. `message`: that, for a worker; None: none does."""

    def __init__(self) -> None:
        self.message: Message | None = None

    def heard(self, step: int, reason: str) -> bool:
        """Take a request; whether it is news."""
        if self.message is not None and self.message["step"] <= step:
            return False
        self.message = {"type": "stop_asked", "step": step, "reason": reason}
        return True


def as_value(step: int, reason: str) -> str:
    """A request as nodes pass it on."""
    return json.dumps({"step": step, "reason": reason})


def from_value(value: str) -> dict[str, Any] | None:
    """The fields of a request that another node passed on; None for anything else that stands in the store."""
    try:
        told = {**json.loads(value), "type": "stop_asked"}
        check(told, TO_AGENT)
    except (ValueError, TypeError, Malformed):
        return None
    return {"step": told["step"], "reason": told["reason"]}
