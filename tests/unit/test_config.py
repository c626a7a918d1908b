"""Settings: what is accepted comes back unchanged, what is wrong is refused with a message that helps."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.config import CheckpointConfig, Config, TrainingConfig, load_config
from elastic_harness.errors import ConfigError
from elastic_harness.gpt.config import LoopConfig, TrainerConfig

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def load(*overrides: str, text: str | None = None, folder: Path | None = None) -> TrainerConfig:
    path = None
    if text is not None:
        assert folder is not None
        path = folder / "config.yaml"
        path.write_text(text)
    return load_config(TrainerConfig, path, overrides)


def message(*overrides: str, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **keywords)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_there_are_shipped_configurations() -> None:
    assert {p.stem for p in SHIPPED} >= {"small", "demo", "base"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configurations_load(path: Path) -> None:
    config = load_config(TrainerConfig, path, ["training.max_steps=60"])
    assert config.training.max_steps == 60
    assert config.slots == 32


def test_defaults_need_no_file() -> None:
    config = load()
    assert config == TrainerConfig()
    assert config.model.context_length == config.data.seq_length


@given(
    st.integers(0, 2**63 - 1),
    st.integers(1, 64),
    st.integers(1, 8),
    st.floats(1e-9, 1e3),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.one_of(st.none(), st.text(min_size=1, max_size=20, alphabet=st.characters(codec="utf-8"))),
)
def test_yaml_round_trip(
    seed: int, slots: int, micro: int, lr: float, precision: Any, path: str | None
) -> None:
    import yaml

    training = TrainingConfig(global_batch_samples=slots * micro, micro_batch_samples=micro)
    config = TrainerConfig(seed=seed, training=training, trainer=LoopConfig(precision=precision))
    config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, lr=lr),
        data=dataclasses.replace(config.data, path=path),
    )
    assert TrainerConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    assert TrainerConfig.from_dict(config.to_dict()) == config
    assert config.slots == slots


def test_saved_file_loads_as_the_same_configuration(tmp_path: Path) -> None:
    config = load("training.max_steps=77", "optimizer.betas=[0.8, 0.99]", "training.clip_norm=null")
    assert load(text=config.to_yaml(), folder=tmp_path) == config
    assert config.optimizer.betas == (0.8, 0.99)
    assert config.training.clip_norm is None


def test_overrides_win_and_the_last_one_wins(tmp_path: Path) -> None:
    config = load("seed=3", "seed=4", text="seed: 2\ntraining:\n  max_steps: 50\n", folder=tmp_path)
    assert (config.seed, config.training.max_steps) == (4, 50)


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003"])
def test_every_spelling_of_a_small_number_is_a_number(text: str) -> None:
    assert load(f"optimizer.lr={text}").optimizer.lr == 3e-4


@pytest.mark.parametrize("path", ["2024", "12:30", "a: b", "2024-01-01", "[x", "true", "some/where"])
def test_a_path_is_text_whatever_yaml_makes_of_it(path: str) -> None:
    assert load(f"data.path={path}").data.path == path


def test_an_empty_section_and_an_empty_file_have_their_defaults(tmp_path: Path) -> None:
    assert load(text="", folder=tmp_path) == TrainerConfig()
    assert load(text="training:\n", folder=tmp_path) == TrainerConfig()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.max_step=5", ["training.max_step", "training.max_steps", "global_batch_samples"]),
        ("trainin.max_steps=5", ["trainin", "Did you mean training"]),
        ("sede=5", ["sede", "Did you mean seed"]),
        ("training.max_steps.x=5", ["max_steps"]),
        ("training=5", ["training", "section", "training.max_steps=5"]),
        ("training.max_steps", ["not an override", "section.key=value"]),
        ("=5", ["not an override"]),
        ("training.max_steps=many", ["training.max_steps", "many", "whole number"]),
        ("training.max_steps=1.5", ["training.max_steps", "1.5", "whole number"]),
        ("training.max_steps=true", ["training.max_steps", "True", "whole number"]),
        ("trainer.compile=1", ["trainer.compile", "true or false"]),
        ("trainer.precision=fp8", ["trainer.precision", "fp8", "bf16"]),
        ("training.clip_norm=nan", ["training.clip_norm", "number"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas", "list of 2"]),
        ("training.max_steps=[", ["training.max_steps", "YAML"]),
        ("training.max_steps=0", ["training.max_steps", "at least 1"]),
        ("training.micro_batch_samples=5", ["32", "multiple", "training.micro_batch_samples=5"]),
        ("training.lanes=33", ["training.lanes", "33", "32"]),
        ("training.lanes=0", ["training.lanes", "at least 1"]),
        ("trainer.ema_decay=1", ["trainer.ema_decay", "between 0 and 1"]),
        ("elastic.progress_timeout_min_s=300", ["elastic.progress_timeout_min_s", "300", "smaller"]),
        ("elastic.exchange_timeout_s=100", ["progress_timeout_max_s", "exchange_timeout_s=100"]),
        ("elastic.progress_timeout_factor=0.5", ["progress_timeout_factor", "greater than 1"]),
        ("model.d_model=130", ["model.d_model", "130", "n_head", "128"]),
        ("model.vocab_size=100", ["model.vocab_size", "256", "bytes"]),
        ("model.context_length=64", ["model.context_length", "64", "data.seq_length=128"]),
        ("scheduler.warmup_steps=201", ["scheduler.warmup_steps", "201", "training.max_steps=200"]),
        ("optimizer.nesterov=true", ["optimizer.nesterov", "momentum"]),
        ("data.validation_fraction=1", ["data.validation_fraction", "below 1"]),
        ("checkpoint.keep_last=0", ["checkpoint.keep_last", "at least 1"]),
        ("seed=-1", ["seed", "-1"]),
    ],
)
def test_what_is_wrong_is_named(override: str, expected: list[str]) -> None:
    text = message(override)
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training:\n  max_steps: 5\n  max_steps: 6\n", ["max_steps", "twice", "line 3"]),
        ("training: 5\n", ["training", "mapping"]),
        ("- 5\n", ["list"]),
        ("training: {\n", ["not valid YAML"]),
        ("1.5: 6\n", ["1.5", "not text"]),
        ("5: 6\n", ["Unknown", "5"]),
        ("trainings:\n  max_steps: 5\n", ["trainings", "Did you mean training"]),
        ("model:\n  n_layers: 5\n", ["model.n_layers", "Did you mean model.n_layer"]),
        ("seed: !!python/object/apply:os.system ['true']\n", ["not valid YAML"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, expected: list[str], tmp_path: Path) -> None:
    shown = message(text=text, folder=tmp_path)
    for part in expected:
        assert part in shown


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(TrainerConfig, tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(TrainerConfig, tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(TrainerConfig, tmp_path)


def test_a_script_with_its_own_model_has_no_model_section() -> None:
    with pytest.raises(ConfigError, match=r"model\.n_layer is '2', but only the built-in trainer reads it"):
        load_config(Config, None, ["model.n_layer=2"])


def test_values_are_checked_without_a_file_too() -> None:
    with pytest.raises(ConfigError, match=r"training\.max_steps is 'x'"):
        TrainingConfig(max_steps="x")  # type: ignore[arg-type]


def test_a_setting_that_has_moved_names_its_new_place_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"training\.precision is 'bf16'.*as trainer\.precision"):
        TrainingConfig(precision="bf16")  # type: ignore[call-arg]


def test_lanes_follow_the_slots_up_to_eight_per_worker() -> None:
    assert load("training.global_batch_samples=256").lanes_resolved == 64
    assert load("elastic.max_workers=2").lanes_resolved == 16
    assert load("training.lanes=4").lanes_resolved == 4
    assert load().lanes_resolved == 32


def test_neither_the_package_nor_its_settings_import_torch_or_numpy() -> None:
    code = (
        "import sys, elastic_harness, elastic_harness.config; elastic_harness.Config, elastic_harness.TrainerConfig; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("max_steps", "warmup_steps"), [(5, 0), (19, 1), (200, 20), (1000, 20)])
def test_the_warm_up_fits_short_trainings(max_steps: int, warmup_steps: int) -> None:
    config = load_config(TrainerConfig, None, [f"training.max_steps={max_steps}"])
    assert config.scheduler.warmup_steps == warmup_steps


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"weights": {"a": 1}}, "data.weights.*needs data.sources"),
        ({"sources": {"a": "a.bin"}, "path": "x"}, "data.path.*cannot be given with data.sources"),
        ({"sources": {}}, "data.sources.*at least one"),
        ({"sources": {"a": "a.bin"}, "weights": {"b": 1}}, r"data.weights.*may only name sources \(a\), not \['b'\]"),
        ({"sources": {"a": "a.bin"}, "weight_changes": {5: {"b": 1}}}, "data.weight_changes.*may only name"),
        ({"sources": {"a": "a.bin"}, "weight_changes": {"soon": {"a": 1}}}, "data.weight_changes.*whole steps"),
        ({"sources": {"a": "a.bin"}, "weights": {"a": "much"}}, "data.weights.*mapping of names to a number"),
        ({"documents": "some"}, "data.documents.*one of join, separate, pack"),
    ],
)
def test_mixtures_that_cannot_be_meant(data: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainerConfig.from_dict({"data": data})


def test_a_mixture_can_be_written_down(tmp_path: Path) -> None:
    text = "data:\n  sources: {a: a.bin, b: b.bin}\n  weights: {a: 0.7, b: 3e-1}\n  weight_changes: {10: {a: 1}}\n"
    (tmp_path / "c.yaml").write_text(text)
    config = load_config(TrainerConfig, str(tmp_path / "c.yaml"), ["data.documents=separate"])
    assert config.data.weights == {"a": 0.7, "b": 0.3} and config.data.weight_changes == {"10": {"a": 1.0}}
    (tmp_path / "d.yaml").write_text(config.to_yaml())
    assert load_config(TrainerConfig, str(tmp_path / "d.yaml")) == config


def test_names_of_the_field_are_other_names_of_settings(tmp_path: Path) -> None:
    written = tmp_path / "field.yaml"
    written.write_text(
        "model: {d_model: 64, num_layers: 2, num_heads: 2, vocab_size: 512}\n"
        "training: {lr: 1e-3, batch_size: 16, max_steps: 5}\n"
        "elastic: {min_nodes: 2, max_nodes: 4}\n"
        "checkpoint: {keep_last_n: 7}\n"
    )
    config = load_config(TrainerConfig, written, ["model.num_layers=3"])
    assert (config.model.n_layer, config.model.n_head, config.optimizer.lr) == (3, 2, 1e-3)
    assert (config.training.global_batch_samples, config.checkpoint.keep_last) == (16, 7)
    assert (config.elastic.min_workers, config.elastic.max_workers) == (2, 4)
    assert load_config(TrainerConfig, written, ["model.n_layer=3"]) == config
    assert CheckpointConfig(keep_last_n=7) == config.checkpoint  # type: ignore[call-arg]
    for values, message in (
        ({"model": {"num_layers": 2, "n_layer": 2}}, "model.num_layers is another name of model.n_layer"),
        ({"training": {"lr": 1e-3, "learning_rate": 1e-3}}, "training.lr is given too"),
        ({"training": {"lr": 1e-3}, "optimizer": {"lr": 1e-3}}, "optimizer.lr is given too"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainerConfig.from_dict(values)
    with pytest.raises(ConfigError, match=r"optimizer\.lr is 0\.001, but only the built-in trainer reads it"):
        Config.from_dict({"training": {"lr": 1e-3}})
    assert "launch --min-workers 2" in Config.from_dict({"elastic": {"min_nodes": 2}}).unread()[0]
