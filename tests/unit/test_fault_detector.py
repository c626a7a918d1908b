"""FaultDetector around real loops: real signals, real hangs, real gradients."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.health import DetectedFault, FaultDetector, FaultDetectorConfig, FaultError, FaultKind, Severity
from elastic_harness.health.watching import detector as detector_module
from unit import watched_loop
from unit.ranks import PATIENCE_S, Rank


def quiet(**settings: Any) -> FaultDetectorConfig:
    """A detector that looks at numbers only, unless these settings say more."""
    return FaultDetectorConfig(**{"on_signal": "ignore", "on_hang": "ignore", "on_memory": "ignore", **settings})


def model_with(*gradients: float) -> nn.Module:
    """A model with a parameter for each of these gradients."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in gradients])
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = torch.full((3,), gradient)
    return model


# ---- numbers


def test_a_loss_that_is_not_finite_raises_before_the_update() -> None:
    told: list[DetectedFault] = []
    with FaultDetector(quiet(), told.append, first_step=40) as detector:
        assert detector.step(loss=torch.tensor(1.5)) == ()
        with pytest.raises(FaultError, match=r"critical, nonfinite in step 41: the loss is nan") as raised:
            detector.step(loss=torch.tensor(math.nan))
    assert told == [raised.value.fault]
    assert (told[0].kind, told[0].severity) == (FaultKind.NONFINITE, Severity.CRITICAL)
    assert told[0].evidence == {"loss": "nan", "grad_norm": None, "parameters": []}


def test_gradients_that_are_not_finite_are_named() -> None:
    model = model_with(1.0, math.inf, 2.0, math.nan, math.inf, -math.inf)
    with FaultDetector(quiet(on_nonfinite="warn"), lambda fault: None) as detector:
        (fault,) = detector.step(loss=0.5, model=model)
        assert "gradients of 1, 3, 4 and 1 more" in fault.message
        assert fault.evidence["parameters"] == ["1", "3", "4", "5"]
        (given,) = detector.step(grad_norm=math.nan, model=model)
        assert given.evidence["parameters"] == ["1", "3", "4", "5"]
        assert detector.step(loss=0.5, model=model_with(1.0, 2.0)) == ()
        assert detector.step() == ()


def test_what_is_ignored_is_not_looked_at() -> None:
    with FaultDetector(quiet(on_nonfinite="ignore", on_spike="ignore")) as detector:
        assert detector.step(loss=math.nan, model=nn.Linear(1, 1)) == ()
    with FaultDetector(quiet(check_interval=3), lambda fault: None) as detector:
        seen = []
        for _ in range(7):
            try:
                seen.append(detector.step(loss=math.nan))
            except FaultError as error:
                seen.append(error.fault.step)
    assert seen == [0, (), (), 3, (), (), 6]


def test_finite_gradients_whose_norm_overflows_are_no_fault() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=torch.float16)) for _ in range(2)])
    for parameter in model:
        parameter.grad = torch.full((4,), 6e4, dtype=torch.float16)
    with FaultDetector(quiet()) as detector:
        assert detector.step(model=model) == ()


def test_sparse_gradients_have_a_norm_too() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    (table(torch.tensor([1, 1, 4])).sum() * math.inf).backward()
    with FaultDetector(quiet(on_nonfinite="warn"), lambda fault: None) as detector:
        (fault,) = detector.step(model=table)
    assert fault.evidence["parameters"] == ["weight"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": nn.Linear(2, 2)}, "after backward.. and before zero_grad"),
        ({"loss": torch.ones(4)}, r"loss has the shape \(4,\), but must be one number; give its mean"),
    ],
)
def test_what_cannot_be_looked_at_is_said(given: dict[str, Any], said: str) -> None:
    with FaultDetector(quiet()) as detector, pytest.raises(UserCodeError, match=said):
        detector.step(**given)


def test_a_spike_is_told_with_the_rule_of_the_harness() -> None:
    with FaultDetector(quiet(spike_window=8), lambda fault: None) as detector:
        for step in range(6):
            assert detector.step(loss=3.0 + step / 100, grad_norm=1.0 + step / 100) == ()
        (fault,) = detector.step(loss=9.0, grad_norm=1.0)
    assert (fault.kind, fault.severity) == (FaultKind.SPIKE, Severity.WARNING)
    assert fault.message.startswith("the loss is 9, ")
    assert fault.evidence == {"loss": 9.0, "grad_norm": 1.0, "window": 8}


def test_a_step_counts_inside_of_the_block_only() -> None:
    detector = FaultDetector(quiet())
    with pytest.raises(UserCodeError, match="inside of"):
        detector.step()
    with detector:
        pass
    with pytest.raises(UserCodeError, match="inside of"):
        detector.step()
    with pytest.raises(UserCodeError, match="make a new one"):
        detector.__enter__()


def test_settings_that_cannot_be() -> None:
    for settings, said in (
        ({"on_hang": "raise"}, "on_hang is 'raise', but must be one of exit, warn, ignore"),
        ({"signals": ("SIGKILL",)}, r"signals is \['SIGKILL'\], but must name signals that a process can handle"),
        ({"signals": "SIGTERM"}, "signals is 'SIGTERM', but must be a list of text"),
        ({"signals": (15,)}, r"signals is \[15\], but must be a list of text"),
        ({"hang_factor": 1.0}, "hang_factor is 1.0"),
        ({"hang_min_s": 700}, "hang_min_s is 700.0, but must be at most hang_max_s=600.0"),
        ({"memory_fraction_max": 1.5}, "memory_fraction_max is 1.5"),
        ({"check_interval": 0}, "check_interval is 0"),
    ):
        with pytest.raises(ConfigError, match=f"fault_detector.{said}"):
            FaultDetectorConfig(**settings)  # type: ignore[arg-type]


# ---- memory


def test_memory_that_is_nearly_full_is_told_once() -> None:
    """The machine is never as empty as a millionth, so this one counts as full."""
    told: list[DetectedFault] = []
    settings = {"on_memory": "warn", "memory_fraction_max": 1e-6, "memory_interval_s": 1e-6}
    with FaultDetector(quiet(**settings), told.append) as detector:
        for _ in range(20):
            detector.step()
    (machine,) = [fault for fault in told if fault.evidence["pool"] == "the machine's memory"]
    assert (machine.kind, machine.severity, machine.step) == (FaultKind.MEMORY, Severity.CRITICAL, 0)
    assert machine.evidence["used_bytes"] > machine.evidence["resident_bytes"] > 1 << 20


def test_memory_is_read_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    monkeypatch.setattr(detector_module, "read_pools", lambda now_s: reads.append(now_s) or [])
    with FaultDetector(quiet(on_memory="warn", memory_interval_s=3600)) as detector:
        for _ in range(20):
            detector.step()
    assert len(reads) == 1


@pytest.mark.slow
def test_memory_that_runs_full_is_told_before_it_is(tmp_path: Path) -> None:
    """A real limit (ulimit -v), and a loop that keeps 8 MiB of every step."""
    rank = Rank(watched_loop.leak)
    said = rank.said()
    assert said["severity"] == "warning" and said["message"].startswith("the address space (ulimit -v) holds ")
    assert 16 <= said["steps"] < watched_loop.ROOM_STEPS and 0 < said["full_in_s"] < PATIENCE_S
    assert rank.end() == 0


# ---- signals


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_only_sets_a_flag_and_handlers_come_back(name: str) -> None:
    rank = Rank(watched_loop.signals, name)
    assert rank.said() == {"began": True}
    os.kill(rank.pid, signal.SIGUSR2)  # which was ignored, and stays so
    os.kill(rank.pid, signal.Signals[name])
    assert rank.said() == {"stops": [name] if name != "SIGTERM" else []}
    if name == "SIGINT":
        os.kill(rank.pid, signal.SIGINT)
    said = rank.said()
    assert said["told"] == [name] * (2 if name == "SIGINT" else 1) and said["kept"]
    assert said["chained"] == ([signal.SIGUSR1] if name == "SIGUSR1" else [])
    assert said["interrupted"] == (name == "SIGINT"), "the second Ctrl-C ends it"
    assert rank.end() == 0


@pytest.mark.slow
def test_a_forked_child_can_be_ended() -> None:
    rank = Rank(watched_loop.forks)
    assert rank.said() == {"alive": True, "status": signal.SIGTERM, "stops": False}
    assert rank.end() == 0


@pytest.mark.slow
def test_handlers_that_could_not_be_put_back_are_refused() -> None:
    rank = Rank(watched_loop.refused)
    said = rank.said()
    assert "SIGUSR1 has a handler that was not installed by Python's signal module" in said["error"]
    assert said["untouched"] and rank.end() == 0


def test_outside_of_the_main_thread_signals_are_refused() -> None:
    errors: list[str] = []

    def enter() -> None:
        try:
            FaultDetector(quiet(on_signal="warn")).__enter__()
        except ConfigError as error:
            errors.append(str(error))
        with FaultDetector(quiet(on_signal="warn", signals=())) as detector:
            detector.step()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "set fault_detector.signals=()" in errors[0]


# ---- hangs


def until(path: Path, text: str) -> str:
    """What a file holds once this text is in it."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < end, f"{text} does not come"
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.slow
def test_a_hang_is_told_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    rank = Rank(watched_loop.hang, "sleep", str(tmp_path / "stacks"), "warn")
    assert rank.said() == {"began": True}
    told = rank.said()
    assert (told["kind"], told["step"], told["pid"]) == ("hang", 10, rank.pid)
    assert "in stuck_here" in told["evidence"]["innermost"][-1]
    assert told["message"].endswith(f"are in {tmp_path / 'stacks'}")
    stacks = (tmp_path / "stacks").read_text()
    assert stacks.startswith("elastic-harness: step 10 has not ended after") and "in stuck_here" in stacks
    assert rank.process.is_alive(), "nothing is killed that was not asked for"
    rank.kill()
    assert rank.end() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lock", "lock at once"])
def test_with_the_interpreters_lock_held_the_timer_shows_stacks(tmp_path: Path, how: str) -> None:
    rank = Rank(watched_loop.hang, how, str(tmp_path / "stacks"), "warn")
    assert rank.said() == {"began": True}
    assert "in stuck_here" in until(tmp_path / "stacks", "in hang")
    rank.kill()
    assert rank.end() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleep", "lock"])
def test_a_process_that_hangs_ends_if_that_was_asked_for(tmp_path: Path, how: str) -> None:
    rank = Rank(watched_loop.hang, how, str(tmp_path / "stacks"), "exit")
    assert rank.said() == {"began": True}
    assert bool(rank.said()) == (how == "sleep"), "no Python runs while the lock is held, so nobody is told"
    assert rank.end() == 1
    assert "in stuck_here" in (tmp_path / "stacks").read_text()


@pytest.mark.slow
def test_a_stopped_process_does_not_hang() -> None:
    rank = Rank(watched_loop.go_on, "stopped")
    assert rank.said() == {"began": True}
    os.kill(rank.pid, signal.SIGSTOP)
    time.sleep(2 * watched_loop.WATCHED)
    rank._line.send_bytes(b"go on")
    os.kill(rank.pid, signal.SIGCONT)
    assert rank.said() == {"faults": []}
    assert rank.end() == 0


@pytest.mark.slow
def test_a_pause_is_no_hang() -> None:
    rank = Rank(watched_loop.go_on, "paused")
    assert rank.said() == {"faults": []}
    assert rank.end() == 0


def test_stacks_that_cannot_be_written_are_refused_with_handlers_as_they_were(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match=r"name another file in fault_detector\.stacks_path"):
        FaultDetector(FaultDetectorConfig(stacks_path=str(tmp_path / "none" / "stacks"))).__enter__()
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_is_left_running() -> None:
    before = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with FaultDetector(quiet(on_hang="warn")) as detector:
            detector.step()
    assert (set(threading.enumerate()), set(os.listdir("/proc/self/fd"))) == before
