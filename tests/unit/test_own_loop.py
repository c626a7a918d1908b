"""What only the built-in trainer reads: a loop of one's own that sets it is told what to write instead."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_harness
from elastic_harness import own_loop
from elastic_harness.agent.decisions import fingerprint
from elastic_harness.config import Config, load_config
from elastic_harness.errors import ConfigError
from elastic_harness.gpt import GPT, trainer
from elastic_harness.gpt.config import LoopConfig, TrainerConfig

SET: dict[str, Any] = {
    "trainer.precision": "bf16",
    "trainer.device": "cuda",
    "trainer.compile": True,
    "trainer.eval_interval_steps": 5,
    "trainer.eval_batches": 2,
    "trainer.log_interval_steps": 10,
    "trainer.ema_decay": 0.9,
    "trainer.tracking": ["wandb"],
    "data.path": "texts",
    "model.n_layer": 2,
    "optimizer.lr": 0.1,
    "scheduler.name": "linear",
}
ONCE_IN_TRAINING = {key.replace("trainer.", "training."): key for key in SET if key.startswith("trainer.")}


def nested(key: str) -> dict[str, Any]:
    section, name = key.split(".")
    return {section: {name: SET[ONCE_IN_TRAINING.get(key, key)]}}


def begin(folder: Path, config: Config | None = None) -> None:
    model = nn.Linear(4, 1)
    data = torch.ones(32, 4)
    run = elastic_harness.start(model, torch.optim.SGD(model.parameters(), lr=0.1), data, config, run_dir=folder)
    run.close()


def test_every_setting_of_the_trainer_has_its_advice() -> None:
    settings = {f"trainer.{field.name}" for field in dataclasses.fields(LoopConfig)}
    assert settings == {key for key in own_loop.INSTEAD if "." in key} <= SET.keys()
    sections = {field.name for field in dataclasses.fields(TrainerConfig)}
    assert set(own_loop.SECTIONS) == sections - {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("how", ["a file", "the command line", "a mapping"])
@pytest.mark.parametrize("key", [*SET, *ONCE_IN_TRAINING])
def test_a_loop_of_ones_own_cannot_set_it(key: str, how: str, tmp_path: Path) -> None:
    place = ONCE_IN_TRAINING.get(key, key)
    value = SET[place]
    with pytest.raises(ConfigError) as caught:
        if how == "a file":
            (tmp_path / "c.yaml").write_text(json.dumps(nested(key)))
            load_config(Config, tmp_path / "c.yaml")
        elif how == "the command line":
            value = json.dumps(value).strip('"')
            load_config(Config, None, [f"{key}={value}"])
        else:
            Config.from_dict(nested(key))
    section = place.partition(".")[0]
    assert str(caught.value).startswith(f"{key} is {value!r}, but only the built-in trainer reads it")
    assert own_loop.INSTEAD.get(place, own_loop.INSTEAD[section]) in str(caught.value)


@pytest.mark.parametrize("key", SET)
def test_start_refuses_it_as_an_argument(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        begin(tmp_path, TrainerConfig.from_dict(nested(key)))
    assert f"{key} is {SET[key]!r}, but only the built-in trainer reads it" in str(caught.value)
    assert not any(tmp_path.iterdir()), "the run was begun"


def test_start_takes_a_trainers_configuration_in_which_only_the_harness_settings_are_set(tmp_path: Path) -> None:
    config = TrainerConfig.from_dict({"training": {"max_steps": 5}})  # of which the warm-up depends
    assert config.unread() == []
    begin(tmp_path, config)
    assert (tmp_path / "fingerprint.json").exists()


@pytest.mark.parametrize("key", ONCE_IN_TRAINING)
def test_the_old_place_names_the_new_one(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is .*reads it, as {ONCE_IN_TRAINING[key]};"):
        TrainerConfig.from_dict(nested(key))


def test_all_that_is_in_the_old_place_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig.from_dict({"training": {"max_steps": 5, "precision": "bf16", "compile": True}})
    assert "as trainer.precision;" in str(caught.value) and "as trainer.compile;" in str(caught.value)
    assert "max_steps" not in str(caught.value)


def test_a_misspelt_setting_of_the_trainer_is_named_as_ever() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean trainer\.precision\?"):
        load_config(TrainerConfig, None, ["trainer.precison=bf16"])


# ---- the fingerprint


def entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *settings: str) -> dict[str, Any]:
    """The fingerprint with which the built-in trainer begins a run."""
    tiny = ["model.n_layer=1", "model.n_head=2", "model.d_model=16", "data.seq_length=8", "training.max_steps=1"]
    (tmp_path / "text.txt").write_text("a line of text\n" * 100)
    config = load_config(TrainerConfig, None, [*tiny, f"data.path={tmp_path}/text.txt", *settings])
    folder = tmp_path / "-".join(["run", *settings])
    monkeypatch.setattr(trainer.torch, "compile", lambda model: model)
    trainer.train(config, str(folder))
    return json.loads((folder / "fingerprint.json").read_text())


def test_the_trainers_settings_are_in_its_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = entries(monkeypatch, tmp_path)
    assert (plain["run.precision"], plain["compile"]) == ("fp32", False)
    for setting, name in (("trainer.precision=bf16", "run.precision"), ("trainer.compile=true", "compile")):
        other = entries(monkeypatch, tmp_path, setting)
        assert [key for key in plain.keys() | other.keys() if plain[key] != other[key]] == [name]


def test_of_a_loop_of_ones_own_the_fingerprint_does_not_name_them(tmp_path: Path) -> None:
    begin(tmp_path)
    assert not {"run.precision", "compile"} & json.loads((tmp_path / "fingerprint.json").read_text()).keys()


class InHalf(Config):
    """The settings of a loop of one's own that computes under autocast, and says so."""

    def fingerprint(self) -> dict[str, Any]:
        return {"loop.autocast": "bf16"}


def test_a_loop_of_ones_own_may_name_what_its_bits_depend_on(tmp_path: Path) -> None:
    begin(tmp_path, InHalf())
    with pytest.raises(ConfigError, match=r"loop\.autocast: the run has 'bf16', this process None"):
        begin(tmp_path)


# ---- what an earlier version recorded


def test_a_run_whose_fingerprint_named_them_goes_on(tmp_path: Path) -> None:
    begin(tmp_path)
    noted = tmp_path / "fingerprint.json"
    now = json.loads(noted.read_text())
    earlier = {**now, "run.precision": "bf16", "compile": False}
    noted.write_text(json.dumps(earlier))
    begin(tmp_path)
    assert fingerprint.difference(earlier, now) == ""
    assert "compile" in fingerprint.difference(earlier, {**now, "compile": True, "run.precision": "bf16"})
    noted.write_text(json.dumps({**earlier, "threads": 99}))
    with pytest.raises(ConfigError, match="threads: the run has 99"):
        begin(tmp_path)


def test_the_built_in_model_is_the_same_wherever_it_is_defined() -> None:
    earlier = {"model.class": "elastic_harness.models.gpt.GPT"}
    now = {"model.class": "elastic_harness.gpt.model.GPT"}
    assert now["model.class"] == f"{GPT.__module__}.{GPT.__qualname__}"
    assert fingerprint.difference(earlier, now) == fingerprint.difference(now, earlier) == ""
    assert "model.class" in fingerprint.difference(earlier, {"model.class": "__main__.GPT"})


def test_an_earlier_configuration_is_read_with_each_setting_in_its_section() -> None:
    config = TrainerConfig.from_dict({"training": {"max_steps": 5}, **nested("model.n_layer")})
    earlier = config.to_dict()
    earlier["training"] |= {**earlier.pop("trainer"), "precision": "bf16"}
    assert own_loop.moved(earlier)["trainer"]["precision"] == "bf16"
    assert TrainerConfig.from_dict(own_loop.moved(earlier)) == dataclasses.replace(
        config, trainer=LoopConfig(precision="bf16")
    )
    assert TrainerConfig.from_dict(own_loop.moved(config.to_dict())) == config


@pytest.mark.parametrize(
    ("word", "now"),
    [
        ("training.precision=bf16", "trainer.precision=bf16"),
        ("training.max_steps=5", "training.max_steps=5"),
        ("trainer.compile=true", "trainer.compile=true"),
        ("--config", "--config"),
        ("data.path=training.device=x", "data.path=training.device=x"),
    ],
)
def test_a_word_of_an_earlier_command_line(word: str, now: str) -> None:
    assert own_loop.moved_override(word) == now
