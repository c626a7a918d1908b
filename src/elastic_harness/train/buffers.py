"""The model's buffers around a slot: every slot starts from those of the step's version, whoever computes it.

Averaged buffers (batch-norm statistics and declared ones) are put back after each slot and what forward made of them
is summed. Any other buffer must stay as it is, except that one which is not part of the state_dict may be replaced (a
cache). So must what modules give with `get_extra_state`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from elastic_harness.checkpoint.structure import encode
from elastic_harness.errors import UserCodeError
from elastic_harness.train.imprint import imprint, state_hash
from elastic_harness.train.state import ExtraState


class Buffers:
    """averaged: names of the buffers to sum, in the order of the sums; they must be buffers of `model`."""

    def __init__(self, model: nn.Module, averaged: Collection[str], dtype: torch.dtype) -> None:
        persistent = model.state_dict(keep_vars=True).keys()
        modules = dict(model.named_modules())
        self._places: dict[str, tuple[nn.Module, str, Tensor]] = {}
        for name, buffer in model.named_buffers():
            prefix, _, attribute = name.rpartition(".")
            self._places[name] = (modules[prefix], attribute, buffer)
        self._averaged = {name: self._places[name][2] for name in averaged}
        self._fixed = [name for name in self._places if name in persistent and name not in self._averaged]
        self._watched = [name for name in self._places if name not in self._averaged]
        self._caches = [name for name in self._watched if name not in self._fixed]
        self._extra = ExtraState(model)
        self._extra_before: dict[str, str] = {}
        self._dtype = dtype
        self.accept_values()

    def zeros(self) -> list[Tensor]:
        """An empty sum for every averaged buffer."""
        return [torch.zeros(b.shape, dtype=self._dtype, device=b.device) for b in self._averaged.values()]

    def accept_values(self) -> None:
        """Take the buffers as they are now for those of the step that begins."""
        self._saved = [b.clone() for b in self._averaged.values()]
        self._versions = {name: buffer._version for name, (_, _, buffer) in self._places.items()}

    def check_unchanged(self) -> None:
        """Raise UserCodeError if a buffer that is state was changed since the commit. Before each unit: notes what the
        others are now, for `finish_slot`."""
        for name in (*self._averaged, *self._fixed):
            module, attribute, buffer = self._places[name]
            if module._buffers.get(attribute) is not buffer or buffer._version != self._versions[name]:
                raise UserCodeError(
                    f"Buffer {name} was changed outside of forward, between two micro-batches or steps. It is training "
                    "state, which must not depend on what one worker does there: evaluate under model.eval(), and call "
                    "model.train() afterwards; load weights before start()."
                )
        self._versions |= {name: self._places[name][2]._version for name in self._caches}
        self._extra_before = self._extra_now()

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo what the forward of a slot that was left half-way did to averaged buffers."""
        for (name, buffer), before in zip(self._averaged.items(), self._saved, strict=True):
            module, attribute, _ = self._places[name]
            module._buffers[attribute] = buffer
            buffer.copy_(before)
            self._versions[name] = buffer._version

    @torch.no_grad()
    def finish_slot(self, sums: list[Tensor], *, counts: bool) -> None:
        """Add what forward made of the averaged buffers to `sums` (unless the slot does not count), and put them
        back. Raises UserCodeError if forward changed any other."""
        for (name, buffer), before, total in zip(self._averaged.items(), self._saved, sums, strict=True):
            value = self._current(name, buffer)
            if counts:
                total.add_(value if buffer.is_floating_point() else value - before)
            buffer.copy_(before)
            self._versions[name] = buffer._version
        for name in self._watched:
            module, attribute, buffer = self._places[name]
            replaced = module._buffers.get(attribute) is not buffer and name in self._fixed
            if replaced or buffer._version != self._versions[name]:
                raise UserCodeError(
                    f"Buffer {name} changed in forward, and which slots a worker computes must not matter. If the mean "
                    f"over the slots is the right new value, pass buffers=[{name!r}] to elastic_harness.start()."
                )

        for name, now in self._extra_now().items():
            if now != self._extra_before[name]:
                raise UserCodeError(
                    f"The extra state of module {name or 'model'} (get_extra_state) changed in forward, and which "
                    "slots a worker computes must not matter. Let it be constant, or hold it in a buffer that "
                    "buffers= names."
                )

    def _extra_now(self) -> dict[str, str]:
        """By module: the hash of what it gives with `get_extra_state`."""
        now = {}
        for name, value in self._extra.state_dict().items():
            tensors: dict[str, Tensor] = {}
            now[name] = state_hash(imprint({name: encode(value, name, tensors)}, tensors))
        return now

    def _current(self, name: str, buffer: Tensor) -> Tensor:
        """The value forward left: in place, or in a new tensor, for which the old one takes the place again."""
        module, attribute, _ = self._places[name]
        value = module._buffers.get(attribute)
        if value is buffer:
            return buffer
        if value is None or value.shape != buffer.shape or value.dtype != buffer.dtype:
            now = "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}"
            raise UserCodeError(
                f"Buffer {name} was {tuple(buffer.shape)} {buffer.dtype} before forward and is {now} after it; a "
                "buffer that is averaged over the slots must keep its shape and type."
            )
        module._buffers[attribute] = buffer
        return value.detach()
