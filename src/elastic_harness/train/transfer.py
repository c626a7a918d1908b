"""Sends whole tensors with a JSON description from one member to another: a record to a laggard, state to a joiner."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash
from torch import Tensor

from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.comm.exchange import TRANSFER, tag
from elastic_harness.comm.group import Group, Work
from elastic_harness.errors import PeerFailed

Payload = tuple[dict[str, Any], dict[str, Tensor]]
CHECKSUM_BYTES = 16


def send_payload(group: Group, rank: int, meta: dict[str, Any], tensors: dict[str, Tensor], timeout_s: float) -> None:
    """Send to one rank; blocks until it has everything. Raises PeerFailed."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    description = json.dumps(
        {
            "meta": meta,
            "tensors": [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in host.items()],
        }
    ).encode()
    messages = [torch.tensor([len(description)]), torch.frombuffer(bytearray(description), dtype=torch.uint8)]
    messages += [t.reshape(-1).view(torch.uint8) for t in host.values() if t.numel()]
    works = [group.send(m.to(group.device), rank, tag(TRANSFER, 0, i)) for i, m in enumerate(messages)]
    checksum = torch.frombuffer(bytearray(_checksum(host)), dtype=torch.uint8).to(group.device)
    works.append(group.send(checksum, rank, tag(TRANSFER, 0, len(messages))))
    group.flush()
    group.wait(works, timeout_s)


def receive_payload(group: Group, rank: int, timeout_s: float) -> Payload:
    """Receive what the other side's `send_payload` sends; the bytes are checked by their hash. Raises PeerFailed."""

    def receive(number: int, elements: int, dtype: torch.dtype) -> Work:
        buffer = torch.empty(elements, dtype=dtype, device=group.device)
        return group.receive(buffer, rank, tag(TRANSFER, 0, number))

    def arrived(work: Work) -> Tensor:
        group.flush()
        group.wait((work,), timeout_s)
        return work.tensor.cpu()

    length = int(arrived(receive(0, 1, torch.int64)))
    description = json.loads(bytes(arrived(receive(1, length, torch.uint8)).numpy()))
    tensors: dict[str, Tensor] = {}
    works: dict[str, Work] = {}
    for name, dtype, shape in description["tensors"]:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensors[name].numel():
            works[name] = receive(2 + len(works), tensors[name].nbytes, torch.uint8)
    checksum = receive(2 + len(works), CHECKSUM_BYTES, torch.uint8)
    group.flush()
    group.wait((*works.values(), checksum), timeout_s)
    for name, work in works.items():
        tensors[name] = work.tensor.cpu().view(tensors[name].dtype).reshape(tensors[name].shape)
    if _checksum(tensors) != bytes(checksum.tensor.cpu().numpy()):
        raise PeerFailed(f"what rank {rank} sent arrived damaged: its checksum is not the announced one")
    return description["meta"], tensors


def _checksum(tensors: dict[str, Tensor]) -> bytes:
    """xxh3 over all bytes in order: against damage on the way, at a tenth of sha256's time, which a joiner waits for
    twice."""
    digest = xxhash.xxh3_128()
    for tensor in tensors.values():
        digest.update(content_of(tensor))
    return digest.digest()
