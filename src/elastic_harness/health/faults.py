"""The faults that a `FaultDetector` finds in a training loop, and its settings. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

from elastic_harness.errors import HarnessError
from elastic_harness.typed import Section

Answer = Literal["raise", "warn", "ignore"]


class FaultKind(str, Enum):
    """What a fault is about."""

    SIGNAL = "signal"  # somebody wants this process to stop
    NONFINITE = "nonfinite"  # a loss or gradients that are NaN or infinite
    SPIKE = "spike"  # a loss or a gradient norm far above that of the steps before
    MEMORY = "memory"  # nearly full, or full soon if it goes on like this
    HANG = "hang"  # a step takes far longer than those before


class Severity(str, Enum):
    """Whether training may go on as if nothing had happened."""

    WARNING = "warning"
    CRITICAL = "critical"  # this step, or this process, comes to no good


@dataclass(frozen=True)
class DetectedFault:
    """One fault, as it is given to callbacks and raised."""

    kind: FaultKind
    severity: Severity
    message: str
    step: int  # the number of the step in which it was found
    evidence: Mapping[str, Any] = field(default_factory=dict)  # what JSON can hold

    def __str__(self) -> str:
        return f"{self.severity.value}, {self.kind.value} in step {self.step}: {self.message}"


class FaultError(HarnessError):
    """A fault whose answer is "raise"."""

    def __init__(self, fault: DetectedFault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True)
class FaultDetectorConfig(Section):
    """What a `FaultDetector` looks for, and what follows. "raise": the callback is told, then `step()` raises
    FaultError. "warn": the callback is told. "ignore": it is not looked for, and costs nothing."""

    section: ClassVar[str] = "fault_detector"

    on_signal: Answer = "warn"
    signals: tuple[str, ...] = ("SIGINT", "SIGTERM", "SIGUSR1")  # each only sets a flag
    on_nonfinite: Answer = "raise"
    on_spike: Answer = "warn"
    spike_sigmas: float = 6.0  # of the loss: so many robust deviations above the median of the window
    spike_norm_sigmas: float | None = 12.0  # of the logarithm of the gradient's norm; None: the norm does not count
    spike_window: int = 128  # steps; nothing stands out before half of them are there
    check_interval: int = 1  # steps from one look at loss and gradients to the next; on a GPU each look waits for it
    on_memory: Answer = "warn"
    memory_fraction_max: float = 0.95  # of a limit
    memory_forecast_s: float = 600.0  # told if memory will be full within so long; 0: no forecast
    memory_interval_s: float = 2.0  # from one reading to the next
    on_hang: Literal["exit", "warn", "ignore"] = "warn"  # exit: ends this process at once, with exit code 1
    hang_factor: float = 8.0  # a step hangs after so many times the slowest recent one, within the bounds below
    hang_min_s: float = 30.0
    hang_max_s: float = 600.0
    hang_first_s: float = 600.0  # at least, until the first step is done: it compiles and warms up
    hang_timer: bool = True  # stacks also while a thread holds the interpreter's lock; takes faulthandler's only timer
    stacks_path: str | None = None  # stacks of hangs are appended to this file; None: to standard error

    def check(self) -> None:
        for name in self.signals:
            known = name in signal.Signals.__members__ and name not in ("SIGKILL", "SIGSTOP")
            self._require(known, "signals", "must name signals that a process can handle", 'for example "SIGTERM"')
        self._positive("spike_sigmas", "spike_norm_sigmas", "memory_fraction_max", "memory_interval_s", "hang_min_s")
        self._at_least(4, "spike_window")
        self._at_least(1, "check_interval")
        self._at_least(0, "memory_forecast_s")
        self._require(self.memory_fraction_max <= 1, "memory_fraction_max", "must be at most 1")
        self._require(
            self.hang_factor > 1, "hang_factor", "must be greater than 1", "a healthy step takes as long as the last"
        )
        self._require(self.hang_min_s <= self.hang_max_s, "hang_min_s", f"must be at most hang_max_s={self.hang_max_s}")
        self._positive("hang_first_s")
