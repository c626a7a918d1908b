"""Training loops in processes of their own, with a FaultDetector around them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import time
from typing import TYPE_CHECKING

from elastic_harness.errors import ConfigError
from elastic_harness.health import DetectedFault, FaultDetector, FaultDetectorConfig, FaultError
from elastic_harness.memory_pools import read_own_limits

if TYPE_CHECKING:
    from unit.ranks import Here

WATCHED = 2.0  # seconds that a step may take
STEP_BYTES, ROOM_STEPS = 8 << 20, 60  # what a leaking step keeps, and how many of them there is room for


def hang(here: Here, how: str, stacks: str, on_hang: str) -> None:
    """Make some steps, and then one that does not end by itself."""
    first_s = 0.4 if how == "lock at once" else 600
    config = FaultDetectorConfig(
        on_hang=on_hang,  # type: ignore[arg-type]
        hang_min_s=0.4,
        hang_first_s=first_s,
        stacks_path=stacks,
    )
    with FaultDetector(config, lambda fault: tell(here, fault), first_step=7) as detector:
        for _ in range(0 if how == "lock at once" else 3):
            detector.step()
            time.sleep(0.1)
        here.say(began=True)
        stuck_here(how)


def stuck_here(how: str) -> None:
    if how.startswith("lock"):
        ctypes.PyDLL(None).sleep(600)  # native code that keeps the interpreter's lock
    time.sleep(600)


def tell(here: Here, fault: DetectedFault) -> None:
    here.say(
        kind=fault.kind.value, step=fault.step, message=fault.message, evidence=dict(fault.evidence), pid=os.getpid()
    )


def go_on(here: Here, slow: str) -> None:
    """Make steps, of which one takes longer than its limit in a way that is no hang; say all faults."""
    faults: list[str] = []
    config = FaultDetectorConfig(hang_min_s=WATCHED, hang_first_s=WATCHED, hang_timer=False)
    with FaultDetector(config, lambda fault: faults.append(str(fault))) as detector:
        for step in range(40):
            detector.step()
            if step == 20 and slow == "stopped":
                here.say(began=True)
                here._line.recv_bytes()  # the test stops this process here
            if step == 20 and slow == "paused":
                with detector.paused():
                    with detector.paused():
                        pass
                    time.sleep(2 * WATCHED)
            time.sleep(0.02)
    here.say(faults=faults)


def signals(here: Here, first: str) -> None:
    """Wait for signals; say what was seen, and what becomes of handlers in the end."""
    chained: list[int] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, lambda number, _: chained.append(number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    config = FaultDetectorConfig(signals=("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"), on_hang="ignore")
    interrupted = False
    told: list[str] = []
    try:
        with FaultDetector(config, lambda fault: told.append(str(fault.evidence["signal"]))) as detector:
            here.say(began=True)
            while not detector.should_stop:
                time.sleep(0.01)
            if first == "SIGTERM":
                here.say(stops=[])  # and ends without another step
            else:
                here.say(stops=[str(fault.evidence["signal"]) for fault in detector.step()])
            if first == "SIGINT":
                time.sleep(600)  # until a second one comes
    except KeyboardInterrupt:
        interrupted = True
    kept = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    kept &= signal.getsignal(signal.SIGINT) is signal.default_int_handler
    kept &= signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    here.say(told=told, chained=chained, interrupted=interrupted, kept=kept)


def forks(here: Here) -> None:
    """Fork a child under the detector: SIGINT and SIGUSR1 are its parent's affair, SIGTERM ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with FaultDetector(FaultDetectorConfig(on_hang="ignore")) as detector:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"x")
            while True:
                time.sleep(0.01)
        os.read(ready, 1)
        for number in (signal.SIGINT, signal.SIGUSR1):
            os.kill(child, number)
            time.sleep(0.2)
        alive = os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        here.say(alive=alive, status=os.waitpid(child, 0)[1], stops=detector.should_stop)


def refused(here: Here) -> None:
    """Say why handlers that could not be put back are refused, and that nothing was changed."""
    faulthandler.register(signal.SIGUSR1)
    try:
        FaultDetector(FaultDetectorConfig(on_hang="ignore")).__enter__()
    except ConfigError as error:
        here.say(error=str(error), untouched=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


def leak(here: Here) -> None:
    """Keep some memory in every step, below a limit, until the detector raises."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
    size = read_own_limits(0.0)[0].used_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_STEPS * STEP_BYTES, resource.RLIM_INFINITY))
    config = FaultDetectorConfig(
        on_hang="ignore", on_memory="raise", memory_interval_s=1e-6, memory_fraction_max=1.0, memory_forecast_s=1e6
    )
    kept = []
    with FaultDetector(config, lambda fault: None) as detector:
        try:
            while True:
                kept.append(bytearray(STEP_BYTES))
                time.sleep(0.02)
                detector.step()
        except FaultError as error:
            fault = error.fault
    here.say(
        severity=fault.severity.value,
        message=fault.message,
        steps=len(kept),
        full_in_s=fault.evidence["full_in_s"],
    )
