"""The trainer in examples/: the same weights and the same best ones, whatever fails on the way."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import elastic_harness
from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager
from elastic_harness.runs.verify import verify
from integration.launch_tools import SOURCE
from integration.script_tools import failing, forked, launch, said

pytestmark = pytest.mark.slow
TRAINER = SOURCE.parent / "examples" / "fault_tolerant_trainer.py"
STEPS = ("--steps", 50)


def best_of(run_dir: Path) -> tuple[int, bytes]:
    """The step and the bytes of the best weights."""
    with CheckpointManager(CheckpointConfig(nvme_path=str(run_dir / "best"))) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.model_state is not None
    return state.step, b"".join(tensor.numpy().tobytes() for tensor in state.model_state.values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = forked(TRAINER, *STEPS, "--run-dir", folder)
    assert ended.returncode == 0 and ended.stdout.count("  best\n") == 2, said(ended)
    return best_of(folder)


def test_an_exception_is_survived_in_the_same_process(tmp_path: Path, undisturbed: tuple[int, bytes]) -> None:
    ended = forked(TRAINER, *STEPS, "--run-dir", tmp_path, **failing("slot.backward step=33 raise"))
    assert ended.returncode == 0 and "InjectedError" in ended.stdout, said(ended)
    assert best_of(tmp_path) == undisturbed and verify(tmp_path).ok


def test_a_validation_that_raised_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: the second one raises, and the fourth, which is that after the last step."""
    calls = 0

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def validate(model: nn.Module) -> float:
        nonlocal calls
        calls += 1
        assert not model.training
        if calls in (2, 4):
            raise ZeroDivisionError(f"in validation {calls}")
        return float(model.weight.sum())

    data = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    config = elastic_harness.Config.from_dict({"training": {"max_steps": 6, "global_batch_samples": 4}})
    trainer = runpy.run_path(str(TRAINER))["FaultTolerantTrainer"](
        make, data, lambda m, batch: m(batch).square().mean(), validate, config, run_dir=tmp_path, validate_every=2
    )
    trainer.fit()
    shown = capsys.readouterr().out
    assert calls == 5 and [shown.count(f"step {step:>4}  validation") for step in (2, 4, 6)] == [1, 1, 1]
    assert "ZeroDivisionError: in validation 4; going on, 2 tries left" in shown


def test_an_exception_that_comes_back_ends_it(tmp_path: Path) -> None:
    rules = "; ".join(f"slot.backward step=3 hit={hit} raise" for hit in range(1, 6))
    ended = forked(TRAINER, *STEPS, "--run-dir", tmp_path, **failing(rules))
    assert ended.returncode == 1 and ended.stdout.count("tries left") == 3, said(ended)
    again = forked(TRAINER, "--steps", 3, "--run-dir", tmp_path)
    assert again.returncode == 0, "what was reached is there"


def test_a_kill_after_the_best_validation_loses_nothing(tmp_path: Path, undisturbed: tuple[int, bytes]) -> None:
    killed = forked(TRAINER, *STEPS, "--run-dir", tmp_path, **failing("slot.backward step=45 kill"))
    assert killed.returncode == -9 and not (tmp_path / "best").exists(), said(killed)
    again = forked(TRAINER, *STEPS, "--run-dir", tmp_path)
    assert again.returncode == 0, said(again)
    assert best_of(tmp_path) == undisturbed


def test_workers_that_die_or_raise_are_replaced(tmp_path: Path, undisturbed: tuple[int, bytes]) -> None:
    rules = "slot.backward member=w0-1 step=25 kill; slot.backward member=w1-1 step=42 raise"
    ended = launch(tmp_path / "run", TRAINER, *STEPS, options=("--nproc-per-node", 2), **failing(rules))
    assert ended.returncode == 0 and "best: step 40" in ended.stdout, said(ended)  # a successor may come too late
    assert best_of(tmp_path / "run") == undisturbed and verify(tmp_path / "run").ok
