"""The observed trainer, with further actions for its failpoints: ways in which a worker hangs. With BLOCK_STACKS in the
environment all its threads block the signal with which the agent asks for stacks."""

from __future__ import annotations

import os
import signal
from typing import Any

import observed_trainer
from ways_to_hang import HANGS

from elastic_harness import failpoints
from elastic_harness.contract.board import STACKS_SIGNAL


def main() -> None:
    act = failpoints._act

    def hang_or_act(action: str, place: str, step: int | None, values: Any) -> None:
        if action not in HANGS:
            act(action, place, step, values)
            return
        os.write(2, f"failpoint {place} (step {step}): {action}\n".encode())
        HANGS[action]()

    failpoints._act = hang_or_act
    if "BLOCK_STACKS" in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
    observed_trainer.main()


if __name__ == "__main__":
    main()
