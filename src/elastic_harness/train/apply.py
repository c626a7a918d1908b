"""A commit is `apply(record)`: everything that changes training state happens here, from the record alone.

No communication, no decision that depends on the membership. A laggard that replays a record does exactly what the
others did. An exception between the first and the last change ends the process: a torn update must not survive.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elastic_harness.errors import EXIT_USER_CODE, UserCodeError
from elastic_harness.failpoints import failpoint
from elastic_harness.train.layout import Layout
from elastic_harness.train.partials import SlotTable
from elastic_harness.train.rng import seed_everything

_owned: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()
ComputedBy = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Record:
    """The outcome of one step: the summed gradient before unscaling and clipping, (E,) on the host, never written
    to; the table of all slots; who computed which lanes."""

    step: int
    generation: int
    flat: Tensor
    table: SlotTable
    computed_by: ComputedBy

    def payload(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As it travels to a laggard."""
        meta = {"step": self.step, "generation": self.generation, "computed_by": self.computed_by}
        return meta, {"flat": self.flat, "table": torch.from_numpy(self.table.words)}

    @staticmethod
    def from_payload(payload: tuple[dict[str, Any], dict[str, Tensor]], like: SlotTable) -> Record:
        meta, tensors = payload
        table = SlotTable(like.slots, like.lanes, like.entries, tensors["table"].numpy())
        computed_by = tuple((member, lo, hi) for member, lo, hi in meta["computed_by"])
        return Record(meta["step"], meta["generation"], tensors["flat"], table, computed_by)


@dataclass(frozen=True)
class Metrics:
    """Of a committed step: mean loss over its target tokens, gradient norm before clipping, learning rate."""

    loss: float
    grad_norm: float | None
    lr: float


class Applier:
    """Knows all registered training state and how one record changes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        buffers: Mapping[str, Tensor],
        *,
        seed: int,
        clip_norm: float | None,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._layout = layout
        parameters = dict(model.named_parameters())
        self._parameters = [parameters[e.name] for e in layout.entries[: layout.parameters]]
        self._buffers = [buffers[name] for name in layout.buffers]
        self._seed = seed
        self._clip_norm = clip_norm
        self._scheduler = scheduler
        self._scaler = scaler
        self._ema = ema
        self._applying = False

    def own(self) -> None:
        """From now on until `disown` the optimizer steps only here. An earlier owner has lost it."""
        self.disown()
        _owned[self._optimizer] = self._optimizer.register_step_pre_hook(self._only_in_a_commit)

    def disown(self) -> None:
        """Give the optimizer back to the user."""
        guard = _owned.pop(self._optimizer, None)
        if guard is not None:
            guard.remove()

    def _only_in_a_commit(self, *step: Any) -> None:
        if not self._applying:
            raise UserCodeError(
                "optimizer.step() was called by the training script, outside of the commit: this worker would have "
                "other weights than the others. Leave it out; the harness calls it once for each step, and "
                "scheduler.step() and scaler.update() with it."
            )

    def apply(self, record: Record) -> Metrics:
        """Turn state of version `record.step` into version `record.step + 1`. Local; cannot be interrupted."""
        if in_order(record.table.weight_N) == 0:
            raise UserCodeError(
                f"Every slot of step {record.step} has weight 0, so there is nothing to learn from: give the dataset "
                "samples with targets, or a larger global batch."
            )
        self._applying = True
        try:
            return self._apply(record)
        except BaseException:
            traceback.print_exc()
            print(
                f"elastic-harness: the optimizer step {record.step} failed half-way; this process ends, because its "
                "state may be torn",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_USER_CODE)
        finally:
            self._applying = False

    def _apply(self, record: Record) -> Metrics:
        seed_everything(self._seed, record.step, -1)
        total = in_order(record.table.weight_N)
        self._set_gradients(record, total)
        self._set_buffers(record)
        failpoint("apply.gradients", record.step)
        norm = self._optimize()
        failpoint("apply.optimizer", record.step)
        lr = float(self._optimizer.param_groups[0]["lr"])
        if self._scheduler is not None:
            self._scheduler.step()
        if self._ema is not None:
            self._ema.update_parameters(self._model)
        for parameter in self._parameters:
            parameter.grad = None
        if self._parameters[0].is_cuda:
            torch.cuda.synchronize()
        return Metrics(in_order(record.table.loss_N * record.table.weight_N) / total, norm, lr)

    def _set_gradients(self, record: Record, total: float) -> None:
        """p.grad = sum / total weight, in new tensors: an optimizer may write into them, the record must stay."""
        present = record.table.present_in((0, record.table.lanes))
        flat = record.flat.to(self._parameters[0].device)
        chosen = [
            (parameter, view)
            for parameter, view, here in zip(self._parameters, self._layout.views(flat), present, strict=False)
            if here
        ]
        means = torch._foreach_div([view for _, view in chosen], total) if chosen else []
        for parameter in self._parameters:
            parameter.grad = None
        for (parameter, _), mean in zip(chosen, means, strict=True):
            parameter.grad = mean.to(parameter.dtype)

    @torch.no_grad()
    def _set_buffers(self, record: Record) -> None:
        """Averaged buffers: the mean over the step's slots of the value after forward; for integers the old value
        plus the rounded mean change."""
        slots = int(np.count_nonzero(record.table.weight_N))
        for buffer, view in zip(self._buffers, self._layout.views(record.flat)[self._layout.parameters :], strict=True):
            mean = (view / slots).to(buffer.device)
            if buffer.is_floating_point():
                buffer.copy_(mean)
            else:
                buffer.add_(mean.round().to(buffer.dtype))

    def _optimize(self) -> float | None:
        """Unscale, clip by the global norm, step. Every member computes the norm alike, from the whole gradient."""
        scaler = self._scaler
        if scaler is not None and scaler.is_enabled():
            scaler.scale(torch.zeros((), device=self._parameters[0].device))  # creates its state if no slot was here
            scaler.unscale_(self._optimizer)
        norm: float | None = None
        if self._clip_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(self._parameters, self._clip_norm))
        if scaler is not None and scaler.is_enabled():
            scaler.step(self._optimizer)
            scaler.update()
        else:
            self._optimizer.step()
        return norm


def in_order(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The sum from first to last, one addition at a time: the same bits everywhere."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total
