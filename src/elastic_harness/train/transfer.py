"""Sends whole tensors with a JSON description from one member to another: a record to a laggard, state to a joiner."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from elastic_harness.comm.exchange import TRANSFER, tag
from elastic_harness.comm.gloo import GlooGroup
from elastic_harness.errors import PeerFailed
from elastic_harness.train.state import fingerprint_tensors

Payload = tuple[dict[str, Any], dict[str, Tensor]]


def send_payload(
    group: GlooGroup, rank: int, meta: dict[str, Any], tensors: dict[str, Tensor], timeout_s: float
) -> None:
    """Send to one rank; blocks until it has everything. Raises PeerFailed."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    description = json.dumps(
        {
            "meta": meta,
            "tensors": [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in host.items()],
            "sha256": fingerprint_tensors(host),
        }
    ).encode()
    messages = [torch.tensor([len(description)]), torch.frombuffer(bytearray(description), dtype=torch.uint8)]
    messages += [t.reshape(-1).view(torch.uint8) for t in host.values() if t.numel()]
    works = [group.send(message, rank, tag(TRANSFER, 0, i)) for i, message in enumerate(messages)]
    for work in works:
        work.wait(timeout_s)


def receive_payload(group: GlooGroup, rank: int, timeout_s: float) -> Payload:
    """Receive what the other side's `send_payload` sends; the bytes are checked by their hash. Raises PeerFailed."""
    length = torch.empty(1, dtype=torch.int64)
    group.receive(length, rank, tag(TRANSFER, 0, 0)).wait(timeout_s)
    raw = torch.empty(int(length), dtype=torch.uint8)
    group.receive(raw, rank, tag(TRANSFER, 0, 1)).wait(timeout_s)
    description = json.loads(bytes(raw.numpy()))
    tensors: dict[str, Tensor] = {}
    works, number = [], 2
    for name, dtype, shape in description["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensors[name] = tensor
        if tensor.numel():
            works.append(group.receive(tensor.reshape(-1).view(torch.uint8), rank, tag(TRANSFER, 0, number)))
            number += 1
    for work in works:
        work.wait(timeout_s)
    if fingerprint_tensors(tensors) != description["sha256"]:
        raise PeerFailed(f"what rank {rank} sent arrived damaged: its sha256 is not the announced one")
    return description["meta"], tensors
