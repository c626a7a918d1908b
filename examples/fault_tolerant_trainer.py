"""A trainer as many frameworks have one: it trains, validates, keeps the best weights, survives exceptions and resumes.

    python examples/fault_tolerant_trainer.py --run-dir runs/trainer
    elastic-harness launch --nproc-per-node 4 examples/fault_tolerant_trainer.py

Killed and started again, or with workers killed on the way, it ends on the same weights and with the same best ones,
bit for bit. After an exception in your code the run goes on from the last committed step: in this process, or, under a
launcher, in another worker. The trainer holds nothing that a failure could leave half done. What must survive is
training state, and `start` has it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic_harness
from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState


class Best:
    """The best validation so far, with its weights, and the step of the last one. It is training state: a checkpoint
    has it, and joiners receive it. So nothing is lost if the worker that would have written a file dies before it does,
    and a validation that an exception ended is done again."""

    def __init__(self) -> None:
        self.last, self.step, self.loss = 0, 0, math.inf
        self.weights: dict[str, Tensor] = {}

    def offer(self, step: int, loss: float, model: nn.Module) -> bool:
        """Keep these weights if none were better."""
        self.last, better = step, loss < self.loss
        if better:
            self.step, self.loss = step, loss
            self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return better

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "step": self.step, "loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last, self.step, self.loss = state["last"], state["step"], state["loss"]
        self.weights = dict(state["weights"])


class FaultTolerantTrainer:
    """Trains what `make` gives on a dataset, with a loss per batch, and a loss for validation. All of it must be the
    same on every worker."""

    def __init__(
        self,
        make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
        dataset: Any,
        loss: Callable[[nn.Module, Any], Tensor],
        validate: Callable[[nn.Module], float],
        config: elastic_harness.Config,
        *,
        run_dir: str | Path | None = None,
        validate_every: int = 20,
        retries: int = 3,
    ) -> None:
        self.make, self.dataset, self.loss, self.validate = make, dataset, loss, validate
        self.config, self.run_dir = config, run_dir
        self.validate_every, self.retries = validate_every, retries

    def fit(self) -> Best:
        """Train to the end, and return the best validation. Under a launcher an exception is its affair; alone, the run
        is resumed in this process."""
        for left in reversed(range(self.retries + 1)):
            try:
                return self._fit()
            except elastic_harness.HarnessError:
                raise  # to try again would not help
            except Exception as error:
                if not left or "RANK" in os.environ:
                    raise
                print(f"{type(error).__name__}: {error}; going on, {left} tries left", flush=True)
        raise AssertionError("the last try returns or raises")

    def _fit(self) -> Best:
        model, optimizer = self.make()
        best = Best()
        with elastic_harness.start(
            model, optimizer, self.dataset, self.config, extra={"best": best}, run_dir=self.run_dir
        ) as run:
            for step in run.steps():
                self._validate_if_due(run, model, best)
                for batch in step.micro_batches():
                    step.backward(self.loss(model, batch))
            self._validate_if_due(run, model, best)
            if run.rank == 0:
                save(best, run.run_dir / "best")
        return best

    def _validate_if_due(self, run: Any, model: nn.Module, best: Best) -> None:
        """Validate on all workers alike: what is kept must be the same on all."""
        if run.step % self.validate_every or run.step == best.last:
            return
        model.eval()
        try:
            with torch.no_grad():
                loss = self.validate(model)
        finally:
            model.train()
        mark = "  best" if best.offer(run.step, loss, model) else ""
        if run.rank == 0:
            print(f"step {run.step:>4}  validation {loss:.4f}{mark}", flush=True)


def save(best: Best, folder: Path) -> None:
    """Write the best weights as a checkpoint of their own. `CheckpointManager.load_checkpoint` reads them."""
    config = CheckpointConfig(nvme_path=str(folder), keep_last=1)
    with CheckpointManager(config) as manager:
        state = CheckpointState(best.step, model_state=best.weights, metrics={"loss": best.loss})
        manager.save_checkpoint(state, wait=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run-dir", help="where to write when there is no launcher to say so")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.rand(1200, 2) * 2 - 1
    labels = ((inputs[:, 0] * inputs[:, 1]) > 0).long()  # the four quadrants, as a chessboard
    training, unseen = (inputs[:1000], labels[:1000]), (inputs[1000:], labels[1000:])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    trainer = FaultTolerantTrainer(
        make,
        torch.utils.data.TensorDataset(*training),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        validate=lambda model: float(F.cross_entropy(model(unseen[0]), unseen[1])),
        config=elastic_harness.Config.from_dict(
            {
                "training": {"max_steps": arguments.steps, "global_batch_samples": 64, "micro_batch_samples": 4},
                "checkpoint": {"checkpoint_interval": 10},
            }
        ),
        run_dir=arguments.run_dir,
    )
    best = trainer.fit()
    print(f"best: step {best.step}, validation {best.loss!r}", flush=True)


if __name__ == "__main__":
    main()
