"""Which slices of distributed state a process has, and which of them it writes. DTensors (FSDP2, tensor parallelism)
are written by their owners, replicated tensors in shares by all processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from elastic_harness.checkpoint.layout import Slice
from elastic_harness.checkpoint.tensors import slice_of


def is_distributed(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def own_slice(name: str, tensor: Tensor) -> tuple[Slice, Tensor, bool]:
    """Return the slice of this tensor that is here, its elements, and whether this process writes it. If several
    processes have the same slice, the first one writes it."""
    if not is_distributed(tensor):
        return slice_of(name, tensor), tensor, True
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(isinstance(placement, Partial) for placement in tensor.placements):  # type: ignore[attr-defined]
        raise ValueError(f"{name} is a DTensor with partial sums; redistribute it before it is saved.")
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    sizes, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    copies = zip(placements, coordinate or (), strict=False)
    first = coordinate is not None and all(at == 0 for how, at in copies if isinstance(how, Replicate))
    local = tensor.to_local()  # type: ignore[attr-defined]
    whole = slice_of(name, tensor)
    if tensor.numel() == 0:
        return whole, local, coordinate is not None and not any(coordinate)
    return whole._replace(offset=tuple(offset), sizes=tuple(sizes)), local, first and local.numel() > 0


def to_write(tensors: Mapping[str, Tensor], rank: int, world: int) -> dict[Slice, Tensor]:
    """Return what this process writes of the state. All processes together write everything once. A process writes its
    shards of DTensors, and a share of the replicated tensors that is about as large as the others'."""
    mine: dict[Slice, Tensor] = {}
    loads = [0] * world
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel(), item[0])):
        if is_distributed(tensor):
            of, local, writes = own_slice(name, tensor)
            if writes:
                mine[of] = local
            continue
        of = slice_of(name, tensor)
        if world > 1 and len(of.shape) > 0 and of.shape[0] >= world and of.nbytes >= CUT_BYTES:
            low, high = (of.shape[0] * index // world for index in (rank, rank + 1))
            offset = (low, *of.offset[1:])
            mine[of._replace(offset=offset, sizes=(high - low, *of.sizes[1:]))] = tensor.detach()[low:high]
        else:
            least = min(range(world), key=loads.__getitem__)
            loads[least] += of.nbytes
            if least == rank:
                mine[of] = tensor
    return mine


CUT_BYTES = 1 << 20  # replicated tensors of at least this size are cut by rows


def targets(tensors: Mapping[str, Tensor]) -> dict[Slice, Tensor]:
    """Return the slices that have to be filled to load into these tensors, each with its memory on this process's
    device."""
    found = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            of, local, _ = own_slice(name, tensor)
            if local.numel():
                found[of] = local
    return found
