"""Sends whole tensors with a JSON description from one member to another: a record to a laggard, state to a joiner."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elastic_harness.comm.exchange import tag
from elastic_harness.comm.transport import Pending, Transport
from elastic_harness.contract.waits import TRANSFER
from elastic_harness.errors import PeerFailed
from elastic_harness.train.imprint import hash_of

Payload = tuple[dict[str, Any], dict[str, Tensor]]
Hashes = dict[str, bytes]
HASH_BYTES = 16


def send_payload(
    transport: Transport,
    rank: int,
    meta: dict[str, Any],
    tensors: dict[str, Tensor],
    timeout_s: float,
    hashed: Callable[[Hashes], None] = lambda hashes: None,
) -> None:
    """Send to one rank; blocks until it has everything. `hashed` hears the hash of every tensor before the other side
    can have the whole. Raises PeerFailed."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    description = json.dumps(
        {
            "meta": meta,
            "tensors": [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in host.items()],
        }
    ).encode()
    messages = [torch.tensor([len(description)]), torch.frombuffer(bytearray(description), dtype=torch.uint8)]
    messages += [t.reshape(-1).view(torch.uint8) for t in host.values() if t.numel()]
    works = [transport.send(m.to(transport.device), rank, tag(TRANSFER, 0, i)) for i, m in enumerate(messages)]
    hashes = {name: hash_of(t) for name, t in host.items()}  # while what was sent is on its way
    hashed(hashes)
    last = torch.frombuffer(bytearray(b"".join(hashes.values())), dtype=torch.uint8).to(transport.device)
    works.append(transport.send(last, rank, tag(TRANSFER, 0, len(messages))))
    transport.flush()
    transport.wait(works, timeout_s)


def receive_payload(transport: Transport, rank: int, timeout_s: float) -> tuple[Payload, Hashes]:
    """Receive what the other side's `send_payload` sends, and the hash of every tensor, by which it was checked.
    Raises PeerFailed."""

    def receive(number: int, elements: int, dtype: torch.dtype) -> Pending:
        buffer = torch.empty(elements, dtype=dtype, device=transport.device)
        return transport.receive(buffer, rank, tag(TRANSFER, 0, number))

    def arrived(work: Pending) -> Tensor:
        transport.flush()
        transport.wait((work,), timeout_s)
        return work.tensor.cpu()

    length = int(arrived(receive(0, 1, torch.int64)))
    description = json.loads(bytes(arrived(receive(1, length, torch.uint8)).numpy()))
    tensors: dict[str, Tensor] = {}
    works: dict[str, Pending] = {}
    for name, dtype, shape in description["tensors"]:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensors[name].numel():
            works[name] = receive(2 + len(works), tensors[name].nbytes, torch.uint8)
    last = receive(2 + len(works), HASH_BYTES * len(tensors), torch.uint8)
    transport.flush()
    transport.wait((*works.values(), last), timeout_s)
    for name, work in works.items():
        tensors[name] = work.tensor.cpu().view(tensors[name].dtype).reshape(tensors[name].shape)
    told = bytes(last.tensor.cpu().numpy())
    hashes = {name: hash_of(tensor) for name, tensor in tensors.items()}
    for number, (name, digest) in enumerate(hashes.items()):
        if digest != told[HASH_BYTES * number : HASH_BYTES * (number + 1)]:
            raise PeerFailed(f"{name}, which rank {rank} sent, arrived damaged: its hash is not the announced one")
    return (description["meta"], tensors), hashes
