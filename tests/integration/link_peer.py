"""One member of a group for test_links.py: RANK WORLD FOLDER HOST COMMAND. Says how it went as one line of JSON.

build           only connects; like the others, it stays until its input ends
receive:FROM    says "ready", waits for its input, then for a message from that rank
exchange:FROM   the same, but sends to all peers first, more than fits into any buffer on the way
send            says "ready", and sends to rank 0 when its input has a line
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from tcp_peer import ELEMENTS, Folder

from elastic_harness.comm import silence, tcp
from elastic_harness.errors import PeerFailed, Unreachable

probes: list[int] = []
original = silence.Probe.__init__


def counted(self: silence.Probe, addresses: dict[int, silence.Address]) -> None:
    probes.append(len(addresses))
    original(self, addresses)


def main(rank: int, world: int, folder: Path, host: str, command: str) -> None:
    silence.Probe.__init__ = counted  # type: ignore[method-assign]
    what, _, source = command.partition(":")
    began, error, ways = time.monotonic(), "", {}
    try:
        group = tcp.build(Folder(folder), rank, world, hostname=host, cancelled=lambda _: None)
        if what != "build":
            print("ready", flush=True)
            sys.stdin.readline()
            began = time.monotonic()
        if what == "exchange":
            sent = [group.send(torch.ones(ELEMENTS), peer, 1) for peer in range(world) if peer != rank]
        if what == "send":
            sent = [group.send(torch.ones(ELEMENTS), 0, 1)]
            group.wait(sent, 60)
        if source:
            group.wait((group.receive(torch.empty(ELEMENTS), int(source), 1),), 60)
    except PeerFailed as failure:
        error, ways = str(failure), failure.ways if isinstance(failure, Unreachable) else {}
    took_s = time.monotonic() - began
    print(json.dumps({"error": error, "ways": ways, "took_s": took_s, "probes": probes}), flush=True)
    sys.stdin.readline()  # a group that were gone already would have no connections for who looks later
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
