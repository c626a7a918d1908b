"""Computes slots: reads their samples, prepares the model and the random state, takes the gradients.

A slot is a pure function of (seed, step, slot, weights): nothing here knows the rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from elastic_harness.data.schedule import Schedule, slot_sample_ids
from elastic_harness.errors import UserCodeError
from elastic_harness.failpoints import failpoint
from elastic_harness.train.apply import forbid_hidden_changes
from elastic_harness.train.layout import Layout
from elastic_harness.train.partials import Contribution, Gradients
from elastic_harness.train.rng import seed_everything
from elastic_harness.train.state import tensor_bytes


class Dataset(Protocol):
    """What the loop needs of a dataset: samples by number, in any order, each read depending on its number alone."""

    def __len__(self) -> int: ...

    def read(self, sample_ids: npt.NDArray[np.int64], /) -> Any: ...

    def fingerprint(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Shape:
    """What a step is made of: N slots of at most `micro_batch` samples, L lanes of consecutive slots."""

    slots: int
    lanes: int
    micro_batch: int

    def lane_slots(self, lane: int) -> range:
        """The slots of a lane; sizes differ by at most one."""
        return range(lane * self.slots // self.lanes, (lane + 1) * self.slots // self.lanes)


class SlotComputer:
    """Runs the slots of a lane one after the other, accumulating into p.grad as autograd does anyway.

    reading(step, slot, sample ids) is called before a slot's samples are read.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        schedule: Schedule,
        shape: Shape,
        layout: Layout,
        buffers: Mapping[str, Tensor],
        *,
        seed: int,
        reading: Callable[[int, int, list[int]], None],
        scaler: Any = None,
    ) -> None:
        parameters = dict(model.named_parameters())
        self._parameters = [parameters[e.name] for e in layout.entries[: layout.parameters]]
        self._names = [e.name for e in layout.entries]
        self._buffers = [buffers[name] for name in layout.buffers]
        self._hidden_change = forbid_hidden_changes(dict(model.named_buffers()), buffers)
        self._dataset = dataset
        self._schedule = schedule
        self._shape = shape
        self._dtype = layout.dtype
        self._seed = seed
        self._reading = reading
        self._scaler = scaler
        self._slot: tuple[int, int, float] | None = None  # step, slot, share of a full slot
        self._seen: tuple[float, float] | None = None  # loss, weight of the running slot
        self._buffer_sums: list[Tensor] = []
        self._contributions: dict[int, Contribution] = {}

    # ---- one lane

    def run(self, step: int, slots: range) -> Iterator[tuple[int, Any]]:
        """Yield (slot, batch) for every non-empty slot of a lane; the caller runs forward and `backward` before it
        asks for the next. Afterwards `take` has the lane's sum and what its slots contributed."""
        self.drop()
        saved = [b.clone() for b in self._buffers]
        for slot in slots:
            ids = slot_sample_ids(self._schedule, self._seed, step, slot, self._shape.micro_batch)
            samples = int.from_bytes(hashlib.sha256(ids.astype("<i8").tobytes()).digest()[:8], "big")
            if len(ids) == 0:
                self._contributions[slot] = Contribution(0.0, 0.0, samples)
                continue
            self._reading(step, slot, ids.tolist())
            batch = self._dataset.read(ids)
            seed_everything(self._seed, step, slot)
            self._slot = (step, slot, len(ids) / self._shape.micro_batch)
            self._seen = None
            yield slot, batch
            self._contributions[slot] = Contribution(*self._contributed(step, slot), samples)
            self._take_buffers(saved)
        self._slot = None

    def _contributed(self, step: int, slot: int) -> tuple[float, float]:
        if self._seen is None:
            raise UserCodeError(
                f"step.backward(loss) was not called for slot {slot} of step {step}: call it exactly once for "
                "every batch of step.micro_batches()"
            )
        return self._seen

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Backward of a slot's mean loss. `weight`: its share of a full slot's target tokens (default: of its
        samples); a full slot's loss is multiplied by exactly 1, that is, not at all."""
        if self._slot is None:
            raise UserCodeError("step.backward(loss) was called outside step.micro_batches()")
        step, slot, share = self._slot
        if self._seen is not None:
            raise UserCodeError(
                f"step.backward(loss) was called twice for slot {slot} of step {step}; add up the losses of a batch "
                "before calling it once"
            )
        share = share if weight is None else float(weight)
        value = loss.detach()
        scaled = loss if share == 1.0 else loss * share
        if self._scaler is not None and self._scaler.is_enabled():
            scaled = self._scaler.scale(scaled)
        scaled.backward()
        failpoint("slot.backward", step)
        self._seen = (float(value), share)

    def take(self) -> tuple[Gradients, dict[int, Contribution]]:
        """The finished lane's gradients, one per entry of the layout (None where absent), and what each of its slots
        contributed. p.grad is empty after."""
        gradients: Gradients = []
        for parameter, name in zip(self._parameters, self._names, strict=False):
            gradient = parameter.grad
            parameter.grad = None
            if gradient is not None and gradient.is_sparse:
                raise UserCodeError(
                    f"Parameter {name} has a sparse gradient, which cannot be summed exactly; use sparse=False."
                )
            gradients.append(gradient if gradient is None else gradient.to(self._dtype))
        return [*gradients, *self._buffer_sums], self._contributions

    # ---- buffers that forward changes

    def drop(self) -> None:
        """Begin a lane afresh; whatever a half-computed one left behind is forgotten."""
        self._slot = None
        self._contributions = {}
        for parameter in self._parameters:
            parameter.grad = None
        self._buffer_sums = [torch.zeros(b.shape, dtype=self._dtype, device=b.device) for b in self._buffers]

    @torch.no_grad()
    def _take_buffers(self, saved: list[Tensor]) -> None:
        """Every slot starts from the buffers of the step's version; what forward made of them is added up."""
        for buffer, before, total in zip(self._buffers, saved, self._buffer_sums, strict=True):
            total.add_(buffer if buffer.is_floating_point() else buffer - before)
            buffer.copy_(before)
        if name := self._hidden_change():
            raise UserCodeError(
                f"Buffer {name} changed in forward, and which slots a worker computes must not matter. If the mean "
                f"over the slots is the right new value, pass buffers=[{name!r}] to elastic_harness.start()."
            )


def canary_word(gradients: Gradients) -> int:
    """63 bits of the hash over a lane's gradients, never 0."""
    digest = hashlib.sha256()
    for gradient in gradients:
        if gradient is not None:
            digest.update(tensor_bytes(gradient))
    return int.from_bytes(digest.digest()[:8], "big") >> 1 | 1
