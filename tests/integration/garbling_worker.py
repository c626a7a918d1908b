"""A worker that trains as `launch_worker` does, but says something wrong the first time it is in step 3: what its place
is to say is given by index in `SAYINGS`."""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

from integration import launch_worker


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def message(**fields: Any) -> bytes:
    return frame(json.dumps(fields).encode())


SAYINGS = (
    b"",
    frame(b"[1]"),
    frame(b"[" * 200_000),
    frame(b"\xff\xfe"),
    b"\xff" * 64,
    message(type=["report"]),
    message(type="kv_set", generation="7", key="0", value=""),
    message(type="kv_set", generation=10**400, key="0", value=""),
    message(type="trouble", generation=2, peers=[["w0-1"]], ways={}, version=3),
    message(type="commit", lineage=0, step=3, generation=1, world_size=2, loss=0.5, ledger={"step": "3"}),
    message(type="checkpoint", event="checkpoint_saved", fields={}),
    message(type="event", event="recovery", fields={"event": "x", "self": 1}),
    message(type="error", error="\ud800"),
)


class Worker(launch_worker.Worker):
    def misbehave(self, step: int) -> None:
        if step >= 3 and self.first_life() and self.index < len(SAYINGS):
            self.sock.sendall(SAYINGS[self.index])
            if self.index == len(SAYINGS) - 1:
                sys.exit(1)
        super().misbehave(step)


if __name__ == "__main__":
    launch_worker.Worker = Worker  # type: ignore[misc]
    launch_worker.main()
