"""Where each parameter's gradient (and each declared buffer) lies in the flat vector that is summed over slots.

Legend: P entries (trainable parameters in name order of the model, then declared buffers), E elements in all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elastic_harness.errors import ConfigError


@dataclass(frozen=True)
class LayoutEntry:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    lo: int
    hi: int


@dataclass(frozen=True)
class Layout:
    """The flat space of a model. `buffers` names those whose values after forward are averaged over the slots."""

    entries: tuple[LayoutEntry, ...]
    buffers: tuple[str, ...]
    dtype: torch.dtype
    elements: int

    @property
    def uniform(self) -> bool:
        """Whether every parameter has the type in which gradients are summed."""
        return all(e.dtype == self.dtype for e in self.entries[: self.parameters])

    @property
    def parameters(self) -> int:
        return len(self.entries) - len(self.buffers)

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view per entry into a flat vector of E elements."""
        return [flat[e.lo : e.hi].view(e.shape) for e in self.entries]

    def flatten(self, tensors: Sequence[Tensor | None], flat: Tensor) -> None:
        """Copy one tensor per entry into a flat vector; an absent one becomes zeros (never read: see presence)."""
        views = self.views(flat)
        present = [(v, t) for v, t in zip(views, tensors, strict=True) if t is not None]
        if present:
            torch._foreach_copy_([v for v, _ in present], [t for _, t in present])
        for view, tensor in zip(views, tensors, strict=True):
            if tensor is None:
                view.zero_()

    def flatten_part(self, tensors: Sequence[Tensor | None], lo: int, hi: int) -> Tensor:
        """Return elements lo:hi of the vector that `flatten` would fill."""
        part = torch.zeros(hi - lo, dtype=self.dtype, device=next((t.device for t in tensors if t is not None), None))
        for entry, tensor in zip(self.entries, tensors, strict=True):
            begin, end = max(lo, entry.lo), min(hi, entry.hi)
            if begin < end and tensor is not None:
                part[begin - lo : end - lo] = tensor.reshape(-1)[begin - entry.lo : end - entry.lo]
        return part


def make_layout(model: nn.Module, buffers: Mapping[str, Tensor], later: Collection[Tensor] = ()) -> Layout:
    """The layout of a model's trainable parameters, tied ones once, and of its averaged buffers. `later`: parameters
    that may become trainable.

    Sums are kept in float32 at least, whatever the parameters' type.
    """
    known = set(map(id, later))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad or id(p) in known}
    if not trainable:
        raise ConfigError("The model has no parameter with requires_grad=True, so there is nothing to train.")
    for name, tensor in trainable.items():
        if tensor.is_complex():
            raise ConfigError(
                f"Parameter {name} is {tensor.dtype}; complex parameters are not supported. Store it as a real tensor "
                "(torch.view_as_real) and view it as complex in forward."
            )
    dtype = torch.float32
    for tensor in trainable.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    entries, offset = [], 0
    for name, member in [*trainable.items(), *buffers.items()]:
        entries.append(LayoutEntry(name, member.shape, member.dtype, offset, offset + member.numel()))
        offset += member.numel()
    return Layout(tuple(entries), tuple(buffers), dtype, offset)


def optimized(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every parameter that the optimizer has."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_buffers(model: nn.Module, averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that are training state: persistent ones and averaged ones."""
    persistent = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent or name in averaged}


def averaged_buffers(model: nn.Module, declared: Sequence[str]) -> dict[str, Tensor]:
    """The buffers that forward changes: running statistics of normalisation layers, and those the user declares."""
    chosen: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            for name, buffer in module.named_buffers(prefix, recurse=False):
                chosen[name] = buffer
    known = dict(model.named_buffers())
    for name in declared:
        if name not in known:
            raise ConfigError(f"buffers=[{name!r}] names no buffer of the model; it has {sorted(known) or 'none'}.")
        chosen[name] = known[name]
    return chosen
