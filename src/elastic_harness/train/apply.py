"""A commit is `apply(record)`: everything that changes training state happens here, from the record alone.

No communication, no decision that depends on the membership. A laggard that replays a record does exactly what the
others did. An exception between the first and the last change ends the process: a torn update must not survive.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.hooks import RemovableHandle

from elastic_harness import omissions, shape
from elastic_harness.contract.messages import PolicyDecision
from elastic_harness.errors import EXIT_USER_CODE, Inconsistent, UserCodeError
from elastic_harness.failpoints import failpoint
from elastic_harness.membership.types import Replica
from elastic_harness.omissions import Omitted
from elastic_harness.policies import StepFacts
from elastic_harness.train.batches import Batches
from elastic_harness.train.layout import Layout
from elastic_harness.train.partials import SlotTable
from elastic_harness.train.policies import Decision, Policies
from elastic_harness.train.rng import seed_everything

_owned: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()
ComputedBy = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Record:
    """The outcome of one step: the summed gradient before unscaling and clipping, (E,) on the host, never written
    to; the table of all slots; who computed which lanes. ends: the script asked for this step to be the last one.
    replicas: the rows in which they did, if there are several shards. omitted: what was not computed on purpose.
    validation: of the weights before this step, if it was due."""

    step: int
    generation: int
    flat: Tensor
    table: SlotTable
    computed_by: ComputedBy
    ends: bool = False
    replicas: tuple[Replica, ...] = ()
    omitted: Omitted = field(default_factory=Omitted)
    validation: float | None = None

    def payload(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As it travels to a laggard."""
        meta = {
            "step": self.step,
            "generation": self.generation,
            "computed_by": self.computed_by,
            "ends": self.ends,
            **({"replicas": self.replicas} if self.replicas else {}),
            **({"omitted": asdict(self.omitted)} if self.omitted.slots else {}),
            **({"validation": self.validation.hex()} if self.validation is not None else {}),
        }
        meta |= {"slots": self.table.slots, "lanes": self.table.lanes}
        return meta, {"flat": self.flat, "table": torch.from_numpy(self.table.words)}

    @staticmethod
    def from_payload(payload: tuple[dict[str, Any], dict[str, Tensor]], entries: int) -> Record:
        """entries: of the layout."""
        meta, tensors = payload
        table = SlotTable(meta["slots"], meta["lanes"], entries, tensors["table"].numpy())
        computed_by = tuple((member, lo, hi) for member, lo, hi in meta["computed_by"])
        rows = tuple(map(tuple, meta.get("replicas", ())))
        omitted = shape.build(Omitted, meta.get("omitted", {}))
        step, generation, ends = meta["step"], meta["generation"], meta["ends"]
        value = float.fromhex(meta["validation"]) if "validation" in meta else None
        return Record(step, generation, tensors["flat"], table, computed_by, ends, rows, omitted, value)


@dataclass(frozen=True)
class Metrics:
    """Of a committed step: mean loss over its target tokens, gradient norm before clipping, learning rate; what
    policies decided about its update, and the slots whose loss is not finite, those that were left out as well."""

    loss: float
    grad_norm: float | None
    lr: float
    decisions: tuple[PolicyDecision, ...] = ()
    bad_slots: tuple[int, ...] = ()

    @property
    def halted(self) -> str:
        """Why a policy ends the run after this step; empty if none does."""
        return next((each.reason for each in self.decisions if each.verdict == "halt"), "")


class Decided(NamedTuple):
    """What is to become of an update."""

    decision: Decision
    facts: StepFacts
    norm: Tensor
    buffers: dict[str, Tensor]
    nothing: bool = False  # nothing of the step was computed, on purpose


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
        policies: Policies | None = None,
        batches: Batches | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._layout = layout
        parameters = dict(model.named_parameters())
        self._parameters = [parameters[e.name] for e in layout.entries[: layout.parameters]]
        self._buffers = {name: buffers[name] for name in layout.buffers}
        self._seed = seed
        self._clip_norm = clip_norm
        self._scheduler = scheduler
        self._scaler = scaler
        self._ema = ema
        self._policies = policies or Policies(())
        self._batches = batches
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

    def decide(self, record: Record) -> Decided:
        """Set the gradients, and ask the policies what becomes of them. Nothing else has changed if this raises, or if
        `forget` follows in place of `apply`. Local."""
        if self._batches is not None:
            self._batches.note_slots(record.step, record.table.slots)
        nothing = in_order(record.table.weight_N) == 0 and bool(np.isfinite(record.table.loss_N).all())
        if nothing and record.omitted.slots:
            return self._omit(record)
        if nothing:
            raise UserCodeError(
                f"Every slot of step {record.step} has weight 0, so there is nothing to learn from: give the dataset "
                "samples with targets, or a larger global batch."
            )
        self.forget()  # an interrupt may have ended the last one half-way
        seed_everything(self._seed, record.step, -1)
        self._set_gradients(record, in_order(record.table.weight_N))
        buffers = self._new_buffers(record)
        norm = self._unscale_and_norm()
        facts = self._facts(record, norm, buffers)
        decision = self._policies.decide(facts)
        if record.omitted.slots:
            decision = replace(decision, verdicts=(_omission(record.omitted, "warn"), *decision.verdicts))
        return Decided(decision, facts, norm, buffers)

    def _omit(self, record: Record) -> Decided:
        """Skip a step of which nothing was computed. No policy is asked."""
        self.forget()
        norm, buffers = torch.zeros(()), dict[str, Tensor]()
        decision = Decision(0.0, (_omission(record.omitted, "skip"),), {})
        return Decided(decision, self._facts(record, norm, buffers), norm, buffers, nothing=True)

    def apply(self, record: Record, decided: Decided | None = None) -> Metrics:
        """Turn state of version `record.step` into version `record.step + 1`. Local; cannot be interrupted. `decided`:
        what `decide` has just returned of this record, if it was asked before."""
        decided = decided or self.decide(record)
        if decided.decision.rollback is not None:
            raise Inconsistent(f"step {record.step} makes the run go back, and is committed by nobody")
        self._applying = True
        try:
            lr = self._change(record, decided)
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
        facts = decided.facts
        norm_told = facts.grad_norm if self._clip_norm is not None and not decided.nothing else None
        return Metrics(facts.loss, norm_told, lr, decided.decision.verdicts, (*facts.bad_slots, *facts.left_out))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def forget(self) -> None:
        """Undo what `decide` has done."""
        self._drop_gradients()
        if self._has_scaler:  # it has noted that the gradients are unscaled, and offers no other way to take that back
            self._scaler._per_optimizer_states.pop(id(self._optimizer), None)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _change(self, record: Record, decided: Decided) -> float:
        """Change the state, and give the learning rate that this was done with."""
        self._policies.accept(decided.decision)
        if self._batches is not None:
            self._batches.committed(record.step)
        applies = decided.decision.scale > 0
        lr_scale = self._lr_scale(record) * decided.decision.lr_scale
        if applies:
            self._set_buffers(decided.buffers)
            failpoint("apply.gradients", record.step)
            self._optimize(self._scale_gradients(decided.norm, decided.decision.scale), lr_scale)
            failpoint("apply.optimizer", record.step, values=self._parameters[-1:])
        else:
            failpoint("apply.skipped", record.step)
            if self._has_scaler and not decided.nothing:
                self._scaler.update()  # its answer to what it has seen
        lr = decided.facts.lr * decided.decision.lr_scale
        self._schedule(expected=applies)
        if applies and self._ema is not None:
            self._ema.update_parameters(self._model)
        self._drop_gradients()
        if self._parameters[0].is_cuda:
            torch.cuda.synchronize()
        return lr

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
        for (parameter, _), mean in zip(chosen, means, strict=True):
            parameter.grad = mean.to(parameter.dtype)

    def _new_buffers(self, record: Record) -> dict[str, Tensor]:
        """Of averaged buffers the mean over the slots of the value after forward; of integers that of the change."""
        slots = int(np.count_nonzero(record.table.weight_N))
        views = self._layout.views(record.flat)[self._layout.parameters :]
        named = zip(self._buffers.items(), views, strict=True)
        return {
            name: (view / slots).to(buffer.device, buffer.dtype if buffer.is_floating_point() else view.dtype)
            for (name, buffer), view in named
        }

    @torch.no_grad()
    def _set_buffers(self, means: Mapping[str, Tensor]) -> None:
        """The mean is the new value; of integers the rounded mean change is added to the old one."""
        for name, mean in means.items():
            buffer = self._buffers[name]
            if buffer.is_floating_point():
                buffer.copy_(mean)
            else:
                buffer.add_(mean.round().to(buffer.dtype))

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @property
    def _has_scaler(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())

    def _unscale_and_norm(self) -> Tensor:
        """Unscale the gradients, and give their global norm. Every member computes it alike, from all of them."""
        if self._has_scaler:
            self._scaler.scale(torch.zeros((), device=self._parameters[0].device))  # creates its state if no slot did
            self._scaler.unscale_(self._optimizer)
        return get_total_norm(self._gradients())

    def _scale_gradients(self, norm: Tensor, scale: float) -> Tensor:
        """Multiply the gradients, and give the norm that they have then."""
        gradients = self._gradients()
        if scale == 1.0 or not gradients:
            return norm
        torch._foreach_mul_(gradients, scale)
        return norm * scale

    def _facts(self, record: Record, norm: Tensor, buffers: Mapping[str, Tensor]) -> StepFacts:
        """What the decision over this update needs. The norm tells of anything non-finite in the gradient; only if it
        does, is every element looked at: without clipping a norm that is too large for its type does no harm."""
        table, value = record.table, float(norm)
        elements = math.isfinite(value) or all(bool(g.isfinite().all()) for g in self._gradients())
        finite = math.isfinite(value) or (elements and self._clip_norm is None)
        bad_buffers = [
            name for name, mean in buffers.items() if bool((self._buffers[name].isfinite() & ~mean.isfinite()).any())
        ]
        return StepFacts(
            step=record.step,
            loss=mean_loss(table),
            grad_norm=value,
            lr=float(self._optimizer.param_groups[0]["lr"]) * self._lr_scale(record),
            slot_losses=tuple(table.loss_N.tolist()),
            slot_weights=tuple(table.weight_N.tolist()),
            finite=finite,
            scaler_skips=self._has_scaler and not elements,
            bad_buffers=tuple(bad_buffers),
        )

    def _lr_scale(self, record: Record) -> float:
        """By what the batch multiplies the learning rate."""
        return 1.0 if self._batches is None else self._batches.lr_scale(record.step)

    def _optimize(self, norm: Tensor, lr_scale: float) -> None:
        """Clip by the global norm, step. The learning rates are scaled for this step, and then they are the very
        objects again that they were: a scheduler goes on from these."""
        if self._clip_norm is not None:
            clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if lr_scale != 1.0:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * lr_scale
        if self._has_scaler:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()
        if lr_scale != 1.0:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _schedule(self, *, expected: bool) -> None:
        """The learning rate goes on with the steps. `expected`: the optimizer has stepped; torch would warn of a first
        step without."""
        if self._scheduler is None:
            return
        if expected:
            self._scheduler.step()
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._scheduler.step()


def _omission(omitted: Omitted, verdict: Literal["warn", "skip"]) -> PolicyDecision:
    """Return what the records say of an omission: a whole step is skipped."""
    if verdict == "skip":
        return PolicyDecision(omissions.NAME, "skip", f"the step is omitted ({omitted.reason})", 0.0)
    named = f"slot{'s' * (len(omitted.slots) > 1)} {', '.join(map(str, omitted.slots))}"
    reason = f"without {named}, omitted ({omitted.reason})"
    return PolicyDecision(omissions.NAME, "warn", reason, 1.0, {"omitted": list(omitted.slots)})


def mean_loss(table: SlotTable) -> float:
    """The mean loss over the target tokens of the slots that count; NaN if none does."""
    counted, total = table.weight_N > 0, in_order(table.weight_N)
    return in_order(table.loss_N[counted] * table.weight_N[counted]) / total if total else math.nan


def in_order(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The sum from first to last, one addition at a time: the same bits everywhere."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total
