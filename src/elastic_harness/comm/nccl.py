"""Point-to-point tensors between the members of one generation, over NCCL. It has not been run on several GPUs yet.

NCCL matches messages between two ranks by their order, not by a tag, and unbatched sends and receives would make a
communicator per pair. So operations are only collected until `flush`, which issues them as one group in the order of
their tags. Both ends sort alike, so the k-th send of a pair meets the k-th receive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_harness.comm.rendezvous import KeyValue, RendezvousStore
from elastic_harness.comm.transport import Pending, in_background
from elastic_harness.errors import PeerFailed

TIMEOUT_S = 1800.0  # NCCL's own, beyond every deadline of ours


class NcclTransport:
    """The transport of one generation between GPUs. Local object."""

    def __init__(self, group: Any, rank: int, world: int, device: torch.device) -> None:
        self._group = group
        self._pending: list[tuple[int, int, bool, Pending]] = []
        self.rank = rank
        self.world = world
        self.device = device
        self.concurrent = False

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Pending:
        return self._later(tensor, rank, tag, sends=True)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Pending:
        return self._later(tensor, rank, tag, sends=False)

    def _later(self, tensor: torch.Tensor, rank: int, tag: int, *, sends: bool) -> Pending:
        work = Pending(None, tensor, rank)
        self._pending.append((tag, rank, sends, work))
        return work

    def flush(self, below: int | None = None) -> None:
        """Issue the operations collected so far (of kinds below `below`) as one group, in the order of the tags."""
        limit = 1 << 31 if below is None else below << 28
        pending = sorted((op for op in self._pending if op[0] < limit), key=lambda op: op[:3])
        self._pending = [op for op in self._pending if op[0] >= limit]
        if not pending:
            return
        try:
            self._group._start_coalescing(self.device)
            for _, rank, sends, work in pending:
                (self._group.send if sends else self._group.recv)([work.tensor], rank, 0)
            issued = self._group._end_coalescing(self.device)
        except RuntimeError as error:
            raise PeerFailed(f"NCCL refused a group of {len(pending)} messages: {error}") from error
        for _, _, _, work in pending:
            work.raw = issued

    def wait(self, works: Sequence[Pending], timeout_s: float) -> None:
        """Block until all works are done."""
        for work in works:
            work.wait_raw(timeout_s)

    def abort(self) -> None:
        """Break the communicator. All pending work fails at once."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def close(self) -> None:
        self.abort()
        self._group = None


def build(
    values: KeyValue, rank: int, world: int, cancelled: Callable[[float], None], *, device: torch.device
) -> NcclTransport:
    """Meet the other members and set up the communicator. Collective; blocks until all are there. Raises what
    `cancelled` raises when the generation has become void."""

    def connect() -> NcclTransport:
        store = RendezvousStore(values)
        group = dist.ProcessGroup(store, rank, world)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        backend = dist.ProcessGroupNCCL(store, rank, world, options)
        backend.eager_connect_single_device(device)
        group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
        return NcclTransport(group, rank, world, device)

    return in_background(connect, cancelled)
