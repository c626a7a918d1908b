"""The built-in trainer's command line: read by the trainer, and by `launch` before it starts any worker. No torch."""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Sequence

from elastic_harness.config import STEP_METRICS, load_config
from elastic_harness.errors import ConfigError
from elastic_harness.gpt.config import VALIDATION, DataConfig, TrainerConfig
from elastic_harness.names import TRAINER
from elastic_harness.object_store import is_remote

GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")  # of NVIDIA's, AMD's and Windows' drivers


def read(argv: Sequence[str] | None) -> tuple[TrainerConfig, str | None]:
    """The configuration and the run folder of a command line. Raises ConfigError for settings that cannot work."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {TRAINER}",
        description=f"Train a small GPT on your text: with `elastic-harness launch … -m {TRAINER}`, with torchrun, or "
        "alone.",
        epilog=f"example: elastic-harness launch --nproc-per-node 4 -m {TRAINER} --config configs/small.yaml "
        "data.path=my_texts/ training.max_steps=60",
    )
    parser.add_argument("--config", help="a YAML file; without it, the defaults")
    parser.add_argument("--run-dir", help="where to write events, ledger and checkpoints when run without a launcher")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    given = parser.parse_intermixed_args(argv)
    config = load_config(TrainerConfig, given.config, given.overrides)
    _check_best(config)
    return config, given.run_dir


def _check_best(config: TrainerConfig) -> None:
    """Raise ConfigError if the best checkpoint is to be chosen by what the trainer does not measure."""
    best, validates = config.checkpoint.best_metric, config.trainer.eval_interval_steps > 0
    measured = [*STEP_METRICS, *([VALIDATION] if validates else [])]
    if best not in measured:
        advice = "set trainer.eval_interval_steps too" if best == VALIDATION else "name one of these"
        raise ConfigError(
            f"checkpoint.best_metric is {best!r}, but the trainer measures {', '.join(measured)}; {advice}."
        )


def check(argv: Sequence[str]) -> TrainerConfig:
    """Return the configuration of a command line. Raises ConfigError if no worker can train with it on this machine."""
    config, _ = read(argv)
    _check_data(config.data)
    if config.trainer.device == "cuda" and not any(glob.glob(pattern) for pattern in GPU_FILES):
        raise no_gpu("this machine has none of " + ", ".join(GPU_FILES))
    return config


def _check_data(data: DataConfig) -> None:
    """Raise ConfigError if a file or folder that the data is to come from is not there."""
    named = {f"data.sources.{name}": path for name, path in (data.sources or {}).items()}
    for key, path in {"data.path": data.path, **named}.items():
        if path is not None and not is_remote(path) and not os.path.exists(os.path.expanduser(path)):
            raise ConfigError(
                f"{key} is {path!r}, which does not exist (looked for in {os.getcwd()}); give a text file, a folder of "
                "them, or a token index"
            )


def no_gpu(why: str) -> ConfigError:
    """What to say where `trainer.device` asks for a GPU that is not there."""
    return ConfigError(f"trainer.device is 'cuda', but {why}; use trainer.device=auto, or cpu")
