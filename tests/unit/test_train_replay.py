"""A worker's part in a replay: what it must not save, and which program it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from elastic_harness.config import CheckpointConfig
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.runs.replayed import ReplayOrder
from elastic_harness.train.replay import _texts, check_beginning, check_program, saving_nothing

ORDER = ReplayOrder("/runs/a", 4, 6, None, {"torch": "2.6", "run.lanes": 3, "device": "cpu", "optimizer.lr": "0.1"})


def test_it_saves_nowhere() -> None:
    elsewhere = CheckpointConfig(nvme_path="/mnt/nvme", s3_bucket="s3://bucket", keep_last=7)
    quiet = saving_nothing(replace(elsewhere, checkpoint_interval=1, memory_snapshot_interval="auto"))
    assert (quiet.checkpoint_interval, quiet.memory_snapshot_interval) == (0, 0)
    assert quiet.nvme_path is None and quiet.upload_url is None
    assert replace(quiet, checkpoint_interval=1) == CheckpointConfig(
        checkpoint_interval=1, memory_snapshot_interval=0, keep_last=7
    )


def test_another_machine_is_no_other_program() -> None:
    check_program(ORDER, ORDER.fingerprint | {"torch": "2.7", "device": "H100"})
    with pytest.raises(ConfigError, match=r"run\.lanes: the run has 3, now 4") as refused:
        check_program(ORDER, ORDER.fingerprint | {"torch": "2.7", "run.lanes": 4})
    assert "torch" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"policy\.spikes\.sigmas: the run has None, now 6"):
        check_program(ORDER, {**ORDER.fingerprint, "policy.spikes.sigmas": 6})


def test_it_does_not_begin_earlier_than_it_was_told() -> None:
    check_beginning(ORDER, 4)
    check_beginning(ORDER, 5)  # a worker that joins later
    with pytest.raises(InfrastructureError, match="with the checkpoint of version 4 of /runs/a, which cannot be read"):
        check_beginning(ORDER, 0)


class Words:
    def texts(self, sample_ids: np.ndarray) -> list[str]:
        return [f"word {sample}" * 1000 for sample in sample_ids]


class Foreign:
    def texts(self, sample_ids: np.ndarray) -> list[str]:
        raise ConfigError("this tokenizer needs the package tokenizers")


def test_samples_are_shown_as_text_where_there_is_a_tokenizer() -> None:
    batch = {"x": torch.tensor([1.5])}
    assert _texts([1, 2], [0], batch) == ["{'x': tensor([1.5000])}"]
    assert [text[:6] for text in _texts(Words(), [3, 4], batch)] == ["word 3", "word 4"]
    assert _texts(Foreign(), [3], batch) == ["(this tokenizer needs the package tokenizers)"]
    assert [len(text) for text in (*_texts(Words(), [3], batch), *_texts([], [0], "x" * 9999))] == [2000, 2000]
