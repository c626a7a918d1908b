"""What a validation and a report may be, and the mean over a validation's batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import elastic_harness
from elastic_harness.config import CheckpointConfig
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.train.measures import Measures
from elastic_harness.train.validation import Validation, evaluating, exact_mean

finite = st.floats(-1e9, 1e9)
values = st.dictionaries(st.integers(0, 99), st.tuples(finite, st.floats(1e-3, 1e6)), min_size=1)


@given(values, st.randoms(use_true_random=False))
def test_the_mean_does_not_depend_on_the_order(values: dict[int, Any], random: Any) -> None:
    items = list(values.items())
    random.shuffle(items)
    assert exact_mean(dict(items)) == exact_mean(values)


def test_the_mean_by_weight() -> None:
    assert exact_mean({0: (1.0, 1.0), 1: (4.0, 2.0), 2: (math.nan, 0.0)}) == 3.0
    assert exact_mean({0: (1e16, 1.0), 1: (1.0, 1.0), 2: (-1e16, 1.0)}) == 1 / 3, "each sum is rounded once"
    assert math.isnan(exact_mean({0: (1.0, 1.0), 1: (math.inf, 1.0)}))
    with pytest.raises(UserCodeError, match="nothing to average"):
        exact_mean({0: (1.0, 0.0)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"measure": None}, "give a function of one batch"),
        ({"batches": iter([1])}, "make a list of it"),
        ({"batches": {"a": 1}}, "a sequence of batches"),
        ({"batches": []}, "at least one"),
        ({"batches": True}, "a sequence of batches"),
        ({"every": 0}, "at least 1"),
        ({"every": 2.5}, "at least 1"),
        ({"name": "loss"}, "none of loss, grad_norm, lr"),
        ({"name": "val loss"}, "a plain name"),
    ],
)
def test_a_validation_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    validation = Validation(**{"measure": float, "batches": 3, "every": 2, **settings})
    with pytest.raises(ConfigError, match=message):
        validation.check()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.ones(2), r"a tensor of shape \(2,\)"),
        (None, "None for batch 1"),
        (True, "True for batch 1"),
        ("0.5", "'0.5' for batch 1"),
        ((1.0, -1.0), "the weight -1.0"),
        ((1.0, math.nan), "the weight nan"),
        ((1.0, 2.0, 3.0), r"\(mean, weight\)"),
    ],
)
def test_a_measure_that_gives_no_value(found: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        Validation(lambda batch: found, 3, 2).value_of(1, 4, 0)


def test_a_value_is_a_function_of_batch_and_version() -> None:
    drawing = Validation(lambda batch: (batch + torch.rand(()), torch.tensor(2)), [torch.zeros(()), torch.ones(())], 2)
    first = drawing.value_of(1, 4, seed=7)
    torch.rand(3)
    assert drawing.value_of(1, 4, seed=7) == first and first[1] == 2.0
    assert len({drawing.value_of(index, version, 7) for index in (0, 1) for version in (4, 6)}) == 4


def test_each_module_has_its_own_mode_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Dropout())
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, False, True] and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ({}, "given nothing"),
        ({"accuracy": 0.5}, "best_metric is 'val_loss': report that"),
        ({"val_loss": torch.tensor(2.0)}, r"val_loss=value.item\(\)"),
        ({"val_loss": math.nan}, "was given nan"),
        ({"val_loss": "2.0"}, "give a number"),
        ({"val_loss": True}, "give a number"),
        ({"val_loss": 2.0, "lr": 0.1}, "use another name"),
    ],
)
def test_a_report_of_no_use(reported: dict[str, Any], message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        Measures(None, "val_loss", False).check_report(reported)


def test_reports_are_of_the_best_metric_that_nobody_else_measures() -> None:
    shared = Validation(float, 3, 2)
    for measures, message in (
        (Measures(None, "loss", False), "every step has that"),
        (Measures(shared, "val_loss", False), "measures that"),
    ):
        assert not measures.is_due(3)
        with pytest.raises(UserCodeError, match=message):
            measures.check_report({"val_loss": 2.0})
    both = Measures(shared, "accuracy", False)
    assert both.is_due(3) and both.check_report({"accuracy": 1, "bleu": 3}) == {"accuracy": 1.0, "bleu": 3.0}


def test_where_a_report_may_be_made(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.rand(8, 2))
    config = elastic_harness.Config.from_dict(
        {
            "training": {"max_steps": 3, "global_batch_samples": 2, "micro_batch_samples": 1},
            "checkpoint": {"best_metric": "val_loss", "checkpoint_interval": 1},
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with elastic_harness.start(model, optimizer, data, config, run_dir=tmp_path) as run:
        for step in run.steps():
            for (x,) in step.micro_batches():
                with pytest.raises(UserCodeError, match="in the middle of step"):
                    run.report(val_loss=1.0)
                step.backward(model(x).mean())
            run.report(val_loss=1.0 + step.index)
            run.report(val_loss=1.0 + step.index)
            with pytest.raises(UserCodeError, match=r"and \d.0 before"):
                run.report(val_loss=9.0)
        with pytest.raises(UserCodeError, match="after the last step was saved"):
            run.report(val_loss=1.0)


def test_checkpoint_config_names_any_metric() -> None:
    assert Measures.of(None, CheckpointConfig(best_metric="val_loss", keep_best=1)).reported == "val_loss"
