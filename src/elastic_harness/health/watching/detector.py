"""Finds faults in any training loop: signals, numbers that are not finite, spikes, memory that runs full, hangs.

    with FaultDetector(FaultDetectorConfig(on_nonfinite="warn")) as detector:
        for batch in loader:
            loss = loss_fn(model, batch)
            loss.backward()
            faults = detector.step(loss=loss, model=model)
            if not any(fault.kind is FaultKind.NONFINITE for fault in faults):
                optimizer.step()
            optimizer.zero_grad()
            if detector.should_stop:
                break                      # and save a checkpoint

It needs no launcher and no process group, and it sends nothing. docs/fault_detector.md tells more.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

from elastic_harness.checkpoint.ranks import Ranks
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.health.faults import Answer, DetectedFault, FaultDetectorConfig, FaultError, FaultKind, Severity
from elastic_harness.health.limits import TimeLimit
from elastic_harness.health.memory import MemoryWatch
from elastic_harness.health.spikes import SpikePolicy
from elastic_harness.health.watching.gpu import read_gpu
from elastic_harness.health.watching.numbers import StepNumbers, read_numbers
from elastic_harness.health.watching.signals import StopSignals
from elastic_harness.health.watching.watchdog import HangWatchdog, HungStep
from elastic_harness.memory_pools import read_own_limits, read_pools, resident_bytes
from elastic_harness.policies import StepFacts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAMED_MAX = 3  # parameters in a message


def print_fault(fault: DetectedFault) -> None:
    """Print a fault to standard error."""
    print(f"elastic-harness: {fault}", file=sys.stderr, flush=True)


class FaultDetector:
    """Watches over a training loop between `__enter__` and `__exit__`. `on_fault` is told every fault: in `step`, or,
    of a hang, in a thread of the detector's own. By default faults are printed. first_step: the number of the first
    step, for a script that resumes. Use it once, in the thread that trains.
    """

    def __init__(
        self,
        config: FaultDetectorConfig | None = None,
        on_fault: Callable[[DetectedFault], None] = print_fault,
        *,
        first_step: int = 0,
    ) -> None:
        self.config = config or FaultDetectorConfig()
        self._on_fault = on_fault
        self._step = first_step
        self._entered = self._left = False
        self._signals = StopSignals(() if self.config.on_signal == "ignore" else self.config.signals)
        self._watchdog: HangWatchdog | None = None
        self._spikes = SpikePolicy(
            "warn", self.config.spike_sigmas, self.config.spike_norm_sigmas, self.config.spike_window
        )
        self._usual = self._spikes.begin()
        self._memory = MemoryWatch(self.config.memory_fraction_max, self.config.memory_forecast_s)
        self._memory_at = float("-inf")

    def __enter__(self) -> FaultDetector:
        if self._entered:
            raise UserCodeError("This FaultDetector was entered before; make a new one.")
        self._entered = True
        c = self.config
        self._signals.install()
        if c.on_hang != "ignore":
            limit = TimeLimit(c.hang_factor, c.hang_min_s, c.hang_max_s, c.hang_first_s)
            try:
                self._watchdog = HangWatchdog(
                    limit,
                    self._tell_hang,
                    stacks_path=c.stacks_path,
                    timer=c.hang_timer,
                    exits=c.on_hang == "exit",
                )
            except OSError as error:
                self._signals.restore()
                raise ConfigError(
                    f"Stacks of hangs cannot be written to {c.stacks_path or 'standard error'}: {error}; name another "
                    "file in fault_detector.stacks_path."
                ) from error
            self._watchdog.start(self._step)
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        if self._watchdog is not None:
            self._watchdog.stop()
        self._signals.restore()
        for fault in self._signal_faults():  # a loop that looks at should_stop makes no step after it
            self._on_fault(fault)

    @property
    def should_stop(self) -> bool:
        """Whether one of the configured signals came to this process. In a process group other ranks may not have it
        yet; `stops_anywhere` asks them."""
        return self._signals.received

    def stops_anywhere(self, group: ProcessGroup | None = None) -> bool:
        """Return whether a signal came to any rank of the group (None: the default one), so that all ranks end after
        the same step. Collective: all ranks call it at the same steps. Blocks until all have."""
        return bool(Ranks(group).greatest(int(self.should_stop)))

    def paused(self) -> AbstractContextManager[None]:
        """Notice no hang within this block, such as a validation or a save, however long it takes."""
        return nullcontext() if self._watchdog is None else self._watchdog.paused()

    def step(
        self,
        *,
        loss: Tensor | float | None = None,
        model: nn.Module | None = None,
        grad_norm: Tensor | float | None = None,
    ) -> tuple[DetectedFault, ...]:
        """Look at a step, and return the faults in it. Call this once per step, after backward and before
        `optimizer.step()`. Raises FaultError if the answer to a fault is "raise"; the update is not applied then.

        loss: () the step's mean loss. model: its gradients are looked at; not with a GradScaler, whose infinite
        gradients are no fault. grad_norm: () the norm before clipping, as `clip_grad_norm_` returns it; then it is not
        computed again, and `model` only names parameters. On a GPU this waits for what it looks at, every
        `check_interval` steps. Local: nothing is sent.
        """
        if not self._entered or self._left:
            raise UserCodeError("FaultDetector.step() works inside of `with FaultDetector(…) as detector:` only.")
        found = [*self._signal_faults(), *self._number_faults(loss, model, grad_norm), *self._memory_faults()]
        self._step += 1
        if self._watchdog is not None:
            self._watchdog.next_step(self._step)
        for fault in found:
            self._on_fault(fault)
        for fault in found:
            if self._answer_to(fault.kind) == "raise":
                raise FaultError(fault)
        return tuple(found)

    def _answer_to(self, kind: FaultKind) -> Answer:
        c = self.config
        answers: dict[FaultKind, Answer] = {
            FaultKind.SIGNAL: c.on_signal,
            FaultKind.NONFINITE: c.on_nonfinite,
            FaultKind.SPIKE: c.on_spike,
            FaultKind.MEMORY: c.on_memory,
        }
        return answers[kind]

    def _signal_faults(self) -> Iterator[DetectedFault]:
        for name in self._signals.take_new():
            message = f"{name} came; save a checkpoint and end"
            yield DetectedFault(FaultKind.SIGNAL, Severity.WARNING, message, self._step, {"signal": name})

    def _number_faults(
        self, loss: Tensor | float | None, model: nn.Module | None, grad_norm: Tensor | float | None
    ) -> Iterator[DetectedFault]:
        c = self.config
        ignored = c.on_nonfinite == "ignore" and c.on_spike == "ignore"
        if ignored or self._step % c.check_interval or (loss is None and model is None and grad_norm is None):
            return
        numbers = read_numbers(loss, model, grad_norm)
        if c.on_nonfinite != "ignore":
            yield from self._nonfinite(numbers)
        if c.on_spike != "ignore":
            yield from self._spike(numbers)

    def _nonfinite(self, numbers: StepNumbers) -> Iterator[DetectedFault]:
        wrong = []
        if numbers.loss_given and not math.isfinite(numbers.loss):
            wrong.append(f"the loss is {numbers.loss}")
        if numbers.norm_given and not math.isfinite(numbers.grad_norm):
            wrong.append(f"the gradient's norm is {numbers.grad_norm}{_of(numbers.bad_parameters)}")
        if wrong:
            message = f"{' and '.join(wrong)}; leave this update out, and look at the step's samples"
            evidence = {
                "loss": repr(numbers.loss) if numbers.loss_given else None,  # JSON has no NaN
                "grad_norm": repr(numbers.grad_norm) if numbers.norm_given else None,
                "parameters": list(numbers.bad_parameters),
            }
            yield DetectedFault(FaultKind.NONFINITE, Severity.CRITICAL, message, self._step, evidence)

    def _spike(self, numbers: StepNumbers) -> Iterator[DetectedFault]:
        facts = StepFacts(self._step, numbers.loss, numbers.grad_norm, 0.0, (), ())
        self._usual, verdict = self._spikes.before_apply(self._usual, facts)
        if verdict.reason:
            evidence = {"loss": numbers.loss, "grad_norm": numbers.grad_norm, "window": self.config.spike_window}
            finite = {name: value for name, value in evidence.items() if math.isfinite(value)}
            yield DetectedFault(FaultKind.SPIKE, Severity.WARNING, verdict.reason, self._step, finite)

    def _memory_faults(self) -> Iterator[DetectedFault]:
        now = time.monotonic()
        if self.config.on_memory == "ignore" or now < self._memory_at + self.config.memory_interval_s:
            return
        self._memory_at = now
        for found in self._memory.judge([*read_pools(now), *read_own_limits(now), *read_gpu(now)]):
            evidence = {**found.evidence, "resident_bytes": resident_bytes()}
            yield DetectedFault(FaultKind.MEMORY, found.severity, found.message, self._step, evidence)

    def _tell_hang(self, hang: HungStep) -> None:
        """Tell of a hang, in the watchdog's thread."""
        message = (
            f"it has taken {hang.seconds:.1f} s, and {hang.limit_s:.1f} s is the limit; the stacks of all threads are "
            f"in {hang.stacks}"
        )
        evidence = {"seconds": round(hang.seconds, 1), "limit_s": round(hang.limit_s, 1), "stacks": hang.stacks}
        innermost = {"innermost": list(hang.innermost)}
        self._on_fault(DetectedFault(FaultKind.HANG, Severity.CRITICAL, message, hang.step, evidence | innermost))


def _of(parameters: tuple[str, ...]) -> str:
    more = len(parameters) - NAMED_MAX
    named = ", ".join(parameters[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    return f" (gradients of {named})" if parameters else ""
