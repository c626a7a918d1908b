"""The ranks of a process group, if there is one: all that we need of other ranks. No pickle."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from elastic_harness.errors import InfrastructureError

if TYPE_CHECKING:
    import torch.distributed as dist


class Ranks:
    """This process's rank and the number of ranks, in a group or (None) the default group. In a world of one nothing is
    sent. With NCCL a GPU's memory is sent."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        grouped = dist.is_available() and dist.is_initialized()
        self._group = group
        self.rank = dist.get_rank(group) if grouped else 0
        self.world = dist.get_world_size(group) if grouped else 1
        self._device = "cuda" if grouped and "nccl" in dist.get_backend(group) else "cpu"

    def token(self) -> int:
        """Return a number that all ranks know and that was never used before. Collective."""
        token = torch.tensor([int.from_bytes(os.urandom(7), "little")], device=self._device)
        if self.world > 1:
            torch.distributed.broadcast(token, group=self._group, group_src=0)
        return int(token.item())

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values. Collective."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MIN, group=self._group)
        return int(tensor.item())

    def greatest(self, value: int) -> int:
        """Return the greatest of all ranks' values. Collective."""
        return -self.least(-value)

    def all(self, holds: bool) -> bool:
        """Return whether `holds` is true on all ranks. Collective."""
        return bool(self.least(int(holds)))

    def barrier(self) -> None:
        """Block until all ranks are here. Collective."""
        self.least(0)

    def on_rank_0(self, work: Callable[[], None]) -> None:
        """Let rank 0 do this while the others wait for it. Its error is raised there, and as an InfrastructureError
        with the same text on the others, which would wait in vain. Collective."""
        failed: Exception | None = None
        if self.rank == 0:
            try:
                work()
            except Exception as error:  # process boundary
                failed = error
        told, *_ = self.gather(b"" if failed is None else (str(failed) or repr(failed)).encode())
        if failed is not None:
            raise failed
        if told:
            raise InfrastructureError(f"Rank 0 failed: {told.decode()}")

    def gather(self, content: bytes) -> list[bytes]:
        """Return what each rank gives, in rank order. Collective."""
        if self.world == 1:
            return [content]
        sizes = torch.zeros(self.world, dtype=torch.int64, device=self._device)
        sizes[self.rank] = len(content)
        torch.distributed.all_reduce(sizes, group=self._group)
        padded = bytearray(content).ljust(max(1, int(sizes.max())), b"\0")
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        everybody = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(everybody, mine, group=self._group)
        found = zip(everybody, sizes.tolist(), strict=True)
        return [theirs.cpu().numpy()[:size].tobytes() for theirs, size in found]
