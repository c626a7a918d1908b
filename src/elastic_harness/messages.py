"""What agent and worker may say to each other, and what the control socket takes: each message's type and fields.

Both ends look here before they act on a message, so that one which is wrong is an error of that message alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_harness import shape
from elastic_harness.wire import Malformed, Message, decode

Table = Mapping[str, shape.Shape]

TO_AGENT: Table = {
    "hello": {
        "protocol": Any,
        "fingerprint": dict[str, Any] | None,
        "max_steps": int | None,
        "deadline_max_s": float | None,
    },
    "report": {
        "generation": int,
        "version": int,
        "record": int | None,
        "lanes": list[tuple[int, int]],
        "checkpoints": list[int],
        "verified": bool,
        "lineages": list[int],
        "lineage": int | None,
    },
    "trouble": {"generation": int, "version": int, "peers": list[str], "ways": dict[str, str]},
    "kv_set": {"generation": int, "key": str, "value": str},
    "kv_get": {"generation": int, "key": str},
    "commit": {
        "lineage": int,
        "step": int,
        "generation": int,
        "world_size": int,
        "loss": float | None,
        "ledger": dict[str, Any] | None,
    },
    "event": {"event": str, "fields": dict[str, Any]},
    "checkpoint": {"event": str, "fields": dict[str, Any]},
    "slot_error": {"step": int, "slot": int, "error": str, "traceback": str | None},
    "error": {"error": str, "traceback": str | None},
    "unfit": {"member": str, "reason": str, "samples": bool},
    "state": {"ledger": dict[str, Any]},
    "diverged": {"reason": str},
    "imports": {"modules": list[str]},
    "leaving": {"generation": int},
    "unsaved": {"error": str},
    "stop_asked": {"step": int, "reason": str},
    "left_loop": {"reason": str},
    "finished": {
        "version": int,
        "weights_sha256": str | None,
        "final_loss": float | None,
        "stop_reason": str | None,
    },
}

TO_WORKER: Table = {
    "generation": {"number": int, "members": list[str], "urgent": bool, "reason": str},
    "pause": {"reason": str},
    "digest": {
        "generation": int,
        "version": int,
        "lineage": int,
        "from_step": int,
        "sources": dict[str, tuple[str, str | None]],
        "lanes": dict[str, list[tuple[int, int]]],
        "unverified": list[str],
    },
    "kv": {"generation": int, "key": str, "value": str},
    "stop": {"reason": str | None, "checkpoint": bool | None},
    "stop_asked": {"step": int, "reason": str},
    "done": {"version": int},
    "refuse": {"reason": str},
}

COMMANDS: Table = {"status": {}, "stop": {}, "scale": {"workers": int}, "kill": {"worker": str}}

CHECKPOINT_EVENTS: Table = {
    name: {"step": int} for name in ("checkpoint_saved", "checkpoint_uploaded", "checkpoint_failed")
}
"""Of a "checkpoint" message, also from the process that writes checkpoints: what the fields of these events hold."""


def check(message: Message, table: Table) -> None:
    """Raise Malformed unless the message is of a known type and has that type's fields, or of a type that is not in
    the table at all: a newer program may say more."""
    kind = message.get("type")
    if not isinstance(kind, str):
        raise Malformed(f"a message without a type ({sorted(message)[:8]})")
    try:
        shape.expect(message, table.get(kind, {}))
        if kind == "checkpoint":
            shape.expect(message["fields"], CHECKPOINT_EVENTS.get(message["event"], {}))
    except ValueError as error:
        raise Malformed(f"a {kind!r} message whose {error}") from None


def checkpoint_event(line: bytes) -> Message:
    """Return what the process that writes checkpoints says in a line. Raises Malformed for anything else."""
    said = {**decode(line), "type": "checkpoint"}
    check(said, TO_AGENT)
    return said


def check_request(request: Message) -> None:
    """Raise Malformed unless it is a command that the control socket knows, with what that needs."""
    command = request.get("command")
    if not isinstance(command, str) or command not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise Malformed(f"the unknown command {str(command)[:40]!r}; this agent knows {known}")
    try:
        shape.expect(request, COMMANDS[command])
    except ValueError as error:
        raise Malformed(f"{command!r} with a request whose {error}") from None
