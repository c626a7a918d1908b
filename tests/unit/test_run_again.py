"""As in a notebook: cells fail, are interrupted and are run again, in one process and with one run folder."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_harness
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.runs.verify import verify
from elastic_harness.train.run import Run
from elastic_harness.train.state import weights_sha256

STEPS = 6
Act = Callable[[int, int], None]


class Cells:
    """The cells of a notebook: one makes everything and starts, one has the loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: Run

    def start(self, seed: int = 1, **training: Any) -> Run:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        data = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
        training = {"max_steps": STEPS, "global_batch_samples": 8, "micro_batch_samples": 2, **training}
        config = elastic_harness.Config.from_dict(
            {"seed": seed, "training": training, "checkpoint": {"checkpoint_interval": 0}}
        )
        self.run = elastic_harness.start(self.model, self.optimizer, data, config, run_dir=self.folder)
        return self.run

    def loop(self, before: Act = lambda step, slot: None, after: Act = lambda step, slot: None) -> str:
        """The weights in the end. `before` and `after` run in each slot, before and after its backward."""
        for step in self.run.steps():
            for slot, batch in enumerate(step.micro_batches()):
                loss = self.forward(batch)
                before(step.index, slot)
                step.backward(loss)
                after(step.index, slot)
        return weights_sha256(self.model)

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch).pow(2).mean()


def raising(at: tuple[int, int], error: type[BaseException] = ZeroDivisionError) -> Act:
    def act(step: int, slot: int) -> None:
        if (step, slot) == at:
            raise error

    return act


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = Cells(tmp_path_factory.mktemp("undisturbed"))
    cells.start()
    return cells.loop()


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "where"), [(0, "before"), (0, "after"), (1, "before"), (1, "after")])
@pytest.mark.parametrize("again", ["start and loop", "loop"])
def test_a_cell_that_failed_goes_on_when_run_again(
    tmp_path: Path, undisturbed: str, slot: int, where: str, again: str
) -> None:
    """In the first and in the second of two slots that are added up in place."""
    cells = Cells(tmp_path)
    cells.start()
    for step in (1, 4):  # the next cell fails too
        with pytest.raises(ZeroDivisionError):
            cells.loop(**{where: raising((step, slot))})
        if again != "loop":
            cells.start()
            assert cells.run.step == step
    assert cells.loop() == undisturbed
    assert verify(tmp_path).ok, verify(tmp_path)


@pytest.mark.slow
def test_with_closes_the_run_and_another_start_goes_on(tmp_path: Path, undisturbed: str) -> None:
    cells = Cells(tmp_path)
    with pytest.raises(KeyboardInterrupt), cells.start():
        cells.loop(raising((3, 1), KeyboardInterrupt))
    with pytest.raises(UserCodeError, match="this run was closed"):
        cells.loop()
    cells.optimizer.step()  # which is the user's again
    with cells.start() as run:
        assert run.step == 3
        assert cells.loop() == undisturbed
    run.close()  # may be called again
    assert verify(tmp_path).ok, verify(tmp_path)


def test_a_start_that_is_refused_leaves_the_folder_free(tmp_path: Path, undisturbed: str) -> None:
    cells = Cells(tmp_path)
    with cells.start():
        pass
    with pytest.raises(ConfigError, match=r"run\.seed"):
        cells.start(seed=9)
    with cells.start():
        assert cells.loop() == undisturbed


@pytest.mark.slow
def test_an_interrupt_waits_for_the_commit(tmp_path: Path, undisturbed: str) -> None:
    """Ctrl-C in the middle of an update, with half of the weights changed."""
    cells = Cells(tmp_path)
    cells.start()
    cells.optimizer.register_step_post_hook(
        lambda *_: signal.raise_signal(signal.SIGINT) if cells.run.step == 2 else None
    )
    with pytest.raises(KeyboardInterrupt):
        cells.loop()
    with pytest.raises(UserCodeError, match="interrupted while step 2 was committed"):
        cells.loop()
    assert cells.start().step == 3
    assert cells.loop() == undisturbed
    assert verify(tmp_path).ok, verify(tmp_path)


def test_weights_that_were_changed_are_not_saved(
    tmp_path: Path, undisturbed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = Cells(tmp_path)
    cells.start()
    with pytest.raises(ZeroDivisionError):
        cells.loop(raising((2, 0)))
    cells.model[0].reset_parameters()
    cells.run.close()
    assert "step 2 is not saved: Parameter 0.weight was changed" in capsys.readouterr().err
    with cells.start() as run:
        assert run.step == 0
        assert cells.loop() == undisturbed


def test_another_folder_with_the_same_optimizer(tmp_path: Path) -> None:
    """The first run was left open: its hold on the optimizer must not end the second."""
    cells = Cells(tmp_path / "first")
    first = cells.start()
    data = torch.randn(8, 4)
    config = elastic_harness.Config.from_dict({"training": {"max_steps": 1, "global_batch_samples": 4}})
    model, optimizer = nn.Linear(4, 1), cells.optimizer
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model.parameters())})
    with elastic_harness.start(model, optimizer, data, config, run_dir=tmp_path / "second") as second:
        for step in second.steps():
            for batch in step.micro_batches():
                step.backward(model(batch).mean())
    assert second.step == 1
    first.close()
