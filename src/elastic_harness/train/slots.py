"""Computes slots: reads their samples, prepares the model and the random state, takes the gradients.

A slot is a pure function of (seed, step, slot, weights): nothing here knows the rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.comm.tree import Span
from elastic_harness.data.order import Order
from elastic_harness.data.schedule import slot_sample_ids
from elastic_harness.errors import UserCodeError
from elastic_harness.failpoints import failpoint
from elastic_harness.runs.ledger import ids_hash
from elastic_harness.train.batch import own_memory
from elastic_harness.train.batches import Batches
from elastic_harness.train.buffers import Buffers
from elastic_harness.train.gradients import HeldGradients
from elastic_harness.train.lane_times import Times
from elastic_harness.train.layout import Layout
from elastic_harness.train.memory import is_out_of_memory
from elastic_harness.train.partials import Contribution, Gradients
from elastic_harness.train.rng import seed_everything


class Dataset(Protocol):
    """What the loop needs of a dataset: samples by number, in any order, each read depending on its number alone."""

    def __len__(self) -> int: ...

    def read(self, sample_ids: npt.NDArray[np.int64], /) -> Any: ...

    def fingerprint(self) -> dict[str, Any]: ...


class SlotComputer:
    """Runs the slots of a unit one after the other, accumulating into p.grad as autograd does anyway.

    reading(step, slot, sample ids) is called before a slot's samples are read.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        batches: Batches,
        order: Order,
        layout: Layout,
        *,
        seed: int,
        reading: Callable[[int, int, list[int]], None],
        scaler: Any = None,
        leaves_out: bool = False,
    ) -> None:
        """leaves_out: a slot whose loss is not finite adds nothing."""
        parameters = dict(model.named_parameters())
        self._names = [e.name for e in layout.entries[: layout.parameters]]
        self._gradients = HeldGradients(self._names, [parameters[name] for name in self._names])
        self._buffers = Buffers(model, layout.buffers, layout.dtype)
        self._dataset = dataset
        self._batches = batches
        self._order = order
        self._dtype = layout.dtype
        self._seed = seed
        self._reading = reading
        self._scaler = scaler
        self._leaves_out = leaves_out
        self._unit: tuple[int, Span, bool] | None = None  # step, lanes, whether as a canary: of what is being summed
        self._slot: tuple[int, int, float] | None = None  # step, slot, share of a full slot
        self._seen: tuple[float, float] | None = None  # loss, weight of the running slot
        self._failed = False  # whether a backward of the running slot ended half-way
        self._ran_out = ""  # the error, if memory did not suffice for the running slot
        self._spilled: tuple[int, int] | None = None  # step, slot: what its backward needs is kept on the host
        self._can_spill = False  # whether that would help the running slot
        self.slot = -1  # the running one, or the next
        self.finished = 0  # slots, ever
        self._buffer_sums: list[Tensor] = []
        self._contributions: dict[int, Contribution] = {}
        self.canary_batches: list[int] = []  # a word for each batch of the newest canary
        self._reading_s = 0.0  # spent in reading samples so far

    # ---- one unit: a lane, or two lanes of one slot each

    def run(
        self,
        step: int,
        unit: Span,
        *,
        canary: bool = False,
        slots: range | None = None,
        omitted: Collection[int] = (),
    ) -> Iterator[tuple[int, Any]]:
        """Yield (slot, batch) for every slot of a unit that is neither empty nor `omitted`; the caller runs forward and
        `backward` before it asks for the next. Afterwards `take_gradients` has the unit's sum and what its slots
        contributed. A unit that was left half-way is taken up where it was left: finished slots are not computed again.
        A `canary` is for comparison only and never counts as begun. `slots`: in place of the unit's."""
        self.undo_slot()
        if self._unit != (step, unit, canary):
            self.drop_unit()
            self._unit = (step, unit, canary)
        slots = self._batches.shape(step).unit_slots(unit) if slots is None else slots
        self.slot = slots[min(len(self._contributions), len(slots) - 1)]
        self._buffers.check_unchanged()
        self._prefetch(step + 1, slots)
        for slot in slots[len(self._contributions) :]:
            self.slot = slot
            ids = self._ids(step, slot)
            read = int(ids_hash(ids), 16)  # goes with the slot's contribution into the header, and on to the ledger
            if len(ids) == 0 or slot in omitted:
                self._contributions[slot] = Contribution(0.0, 0.0, read)
                continue
            self._reading(step, slot, ids.tolist())
            seed_everything(self._seed, step, slot)
            began_at = time.perf_counter()
            batch = own_memory(self._dataset.read(ids))
            self._reading_s += time.perf_counter() - began_at
            if canary:
                self.canary_batches.append(batch_word(batch))  # now: the user's code may change it
            self._slot = (step, slot, len(ids) / self._batches.micro_batch)
            self._seen, self._failed, self._ran_out, self._can_spill = None, False, "", False
            yield slot, batch
            if self._ran_out:
                raise MemoryError(self._ran_out)
            self._gradients.take_back(self.where())
            contribution = Contribution(*self._contributed(step, slot), read)
            self._buffers.finish_slot(self._buffer_sums, counts=contribution.weight > 0)
            self._contributions[slot] = contribution
            self._slot = None
            self.finished += 1

    def _prefetch(self, step: int, slots: Sequence[int]) -> None:
        """Have a dataset that reads from far away fetch what these slots need next time."""
        if getattr(self._dataset, "remote", False):
            ids = [self._ids(step, slot) for slot in slots]
            self._dataset.prefetch(np.concatenate(ids))  # type: ignore[attr-defined]

    def _ids(self, step: int, slot: int) -> npt.NDArray[np.int64]:
        return slot_sample_ids(self._batches.schedule, self._order, step, slot, self._batches.micro_batch)

    def sample_ids(self, step: int, slot: int) -> list[int]:
        """Which samples a slot of any step reads."""
        found: list[int] = self._ids(step, slot).tolist()
        return found

    def times(self) -> Times:
        """What this thread has spent its time on so far."""
        return Times.now(self._reading_s)

    def begun_unit(self) -> Span | None:
        """Return the unit that has a finished slot and whose gradients were not taken yet, or None."""
        if self._unit is None or not self._contributions:
            return None
        _, unit, canary = self._unit
        return None if canary else unit

    def where(self) -> str:
        """The running slot in words."""
        return "no slot" if self._slot is None else f"slot {self._slot[1]} of step {self._slot[0]}"

    def undo_slot(self) -> None:
        """Undo what a slot has done to the model that was left half-way by an exception. If its backward had begun, the
        whole unit is done again."""
        if self._slot is None:
            return
        self._slot = None
        self._buffers.put_back()
        if self._gradients.lent:
            self.drop_unit()

    def start_over(self) -> None:
        """Undo all that was done of the unit, with the slot that was left half-way: wherever that was."""
        self.undo_slot()
        self.drop_unit()

    def spill(self, step: int, slot: int) -> bool:
        """Keep on the host what the forward of this slot saves on a GPU for its backward, from now on. That moves bits
        and changes none. Return whether it is worth another try: not if the loss was no function, so that its forward
        is out of reach, nor if there is no GPU, nor a second time."""
        spilled, self._spilled = self._spilled, (step, slot)
        return self._can_spill and spilled != (step, slot)

    def accept_buffers(self) -> None:
        """Take the buffers as they are now for those of the step that begins."""
        self._buffers.accept_values()

    def _contributed(self, step: int, slot: int) -> tuple[float, float]:
        if self._seen is None:
            raise UserCodeError(
                f"step.backward(loss) was not called for slot {slot} of step {step}: call it exactly once for "
                "every batch of step.micro_batches(), in place of loss.backward(); to leave a batch out, give weight=0"
            )
        return self._seen

    def backward(self, loss: Tensor | Callable[[], Tensor], weight: float | None = None) -> None:
        """Backward of a slot's mean loss, or of what a function returns as such. `weight`: its share of a full slot's
        target tokens (default: of its samples); a full slot's loss is multiplied by exactly 1, that is, not at all. A
        slot of weight 0 adds nothing, whatever its loss; nor does one that is left out, because its loss is not finite.
        If memory runs out, the exception ends here, and `run` raises MemoryError when the next batch is asked for."""
        if self._slot is None:
            raise UserCodeError("step.backward(loss) was called outside step.micro_batches()")
        step, slot, share = self._slot
        if self._seen is not None or self._ran_out:
            raise UserCodeError(
                f"step.backward(loss) was called twice for slot {slot} of step {step}; add up the losses of a batch "
                "before calling it once"
            )
        if self._failed:
            raise UserCodeError(
                f"step.backward(loss) failed for slot {slot} of step {step}, and the gradients of some parameters have "
                "been added already, so it cannot be repeated. Let its exception end the worker: another one computes "
                "the slot."
            )
        share = share if weight is None else float(weight)
        if not (math.isfinite(share) and share >= 0):
            raise UserCodeError(f"step.backward(loss, weight={weight}): the weight must be finite and at least 0")
        if share == 0:
            self._seen = (0.0, 0.0)
            return
        self._can_spill = callable(loss) and self._gradients.on_gpu
        try:
            with save_on_cpu() if self._spilled == (step, slot) else nullcontext():
                value = loss() if callable(loss) else loss
            self._seen = self._backward(value, share, step, slot)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._ran_out = str(error) or type(error).__name__  # the error itself would keep all that its frames hold

    def _backward(self, loss: Tensor, share: float, step: int, slot: int) -> tuple[float, float]:
        """Return the loss and the weight of the slot."""
        if not isinstance(loss, Tensor):
            raise UserCodeError(
                f"step.backward() was given {str(loss)[:80]!r} for slot {slot} of step {step}; give the loss as a "
                "tensor, or a function that returns it"
            )
        if not loss.requires_grad:
            raise UserCodeError(
                f"The loss of slot {slot} of step {step} has no gradient: it was computed under torch.no_grad() or "
                "torch.inference_mode(), perhaps left on after an evaluation, or from detached tensors."
            )
        value = loss.detach()
        if self._leaves_out and not bool(value.isfinite()):
            return float(value), 0.0
        scaled = loss if share == 1.0 else loss * share
        if self._scaler is not None and self._scaler.is_enabled():
            scaled = self._scaler.scale(scaled)
        self._gradients.lend(self.where())  # `run` takes them back when the next batch is asked for
        self._failed = True
        scaled.backward()
        self._failed = False
        self._gradients.note_backward()
        failpoint("slot.backward", step, slot)
        return float(value), share

    def take_gradients(self) -> tuple[Gradients, dict[int, Contribution]]:
        """The finished unit's gradients, one per entry of the layout (None where absent), and what each of its slots
        contributed. p.grad is empty after."""
        gradients: Gradients = []
        for gradient, name in zip(self._gradients.take_sums(), self._names, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise UserCodeError(
                    f"Parameter {name} has a sparse gradient, which cannot be summed exactly; use sparse=False."
                )
            gradients.append(gradient if gradient is None else gradient.to(self._dtype))
        taken = [*gradients, *self._buffer_sums], self._contributions
        self._unit = None
        return taken

    def drop_unit(self) -> None:
        """Forget the unit that is being computed, with its sums."""
        self._slot = None
        self._unit = None
        self._contributions = {}
        self.canary_batches = []
        self._gradients.drop_sums()
        self._buffer_sums = self._buffers.zeros()


def gradients_word(gradients: Gradients) -> int:
    """63 bits of the hash over the sum of some lanes, never 0. All values that are not a number count as equal, because
    their bits may depend on where a tensor lies in memory."""
    digest = xxhash.xxh3_64()
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        nan = gradient.isnan()
        digest.update(f"{index} ".encode())
        digest.update(content_of(gradient.masked_fill(nan, math.nan) if bool(nan.any()) else gradient))
    return digest.intdigest() >> 1 | 1


def batch_word(batch: Any) -> int:
    """63 bits of the hash over what a batch holds, never 0. What is no tensor, array, collection or plain value does
    not count: two batches may differ in it and have the same word."""
    digest = xxhash.xxh3_64()
    for content in _contents(batch):
        digest.update(content)
    return digest.intdigest() >> 1 | 1


def _contents(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.layout == torch.strided:
            yield content_of(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield repr(key).encode()
            yield from _contents(each)
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _contents(each)
    elif isinstance(value, str | bytes | int | float | None):
        yield repr(value).encode()
