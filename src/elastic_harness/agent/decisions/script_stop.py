"""A script's request to end the run (`run.stop`), as the agent keeps it for workers and nodes that have not heard of
it.

The worker that asks tells the others itself, in the header of the step. The agent's copy matters if that worker dies
before it could do so.
"""

from __future__ import annotations

import json

from elastic_harness import shape
from elastic_harness.contract.messages import EndAsked
from elastic_harness.contract.wire import as_fields

KEY = "stop_asked"  # in the values of a generation, through which nodes tell each other


class ScriptStop:
    """The earliest step after which a script wants the run to end, if one does."""

    def __init__(self) -> None:
        self.asked: EndAsked | None = None

    def heard(self, asked: EndAsked) -> bool:
        """Take a request, and return whether it is news."""
        before, self.asked = self.asked, asked.or_earlier(self.asked)
        return self.asked != before


def as_value(asked: EndAsked) -> str:
    """Return a request as nodes pass it on."""
    return json.dumps(as_fields(asked))


def from_value(value: str) -> EndAsked | None:
    """Return the request that another node passed on. Return None for any other value in the store."""
    try:
        return shape.build(EndAsked, shape.parse_object(value))
    except ValueError:
        return None
