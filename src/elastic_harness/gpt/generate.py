"""`elastic-harness generate`: text from the built-in model of any run, through plain PyTorch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from elastic_harness import own_loop
from elastic_harness.config_file import read_yaml
from elastic_harness.data.token_index import TokenIndexFile, is_token_index
from elastic_harness.data.tokenizers import ByteTokenizer, Tokenizer, restore
from elastic_harness.errors import EXIT_SUCCESS, CheckpointCorrupt, ConfigError, HarnessError
from elastic_harness.gpt.config import TrainerConfig
from elastic_harness.gpt.model import GPT
from elastic_harness.runs.named import of_run

WEIGHTS_NAME = "weights.safetensors"
CONFIG_NAME = "config.yaml"


def load_model(run_dir: str | Path) -> GPT:
    """The run's model with the weights of its newest whole checkpoint, or those it exported, in evaluation mode."""
    folder = Path(run_dir)
    model = GPT(_config(folder).model)
    weights = _weights(folder)
    expected = model.state_dict()
    # Tied weights are one tensor in the model, stored under one of its names.
    places = {name: tensor.data_ptr() for name, tensor in expected.items()}
    for name, place in places.items():
        twins = [other for other in places if places[other] == place and other in weights]
        if name not in weights and twins:
            weights[name] = weights[twins[0]]
    differing = sorted(set(weights) ^ set(expected)) or [
        name for name in expected if weights[name].shape != expected[name].shape
    ]
    if differing:
        raise ConfigError(
            f"{folder}: the weights do not fit the model that config.yaml describes, beginning with "
            f"{differing[0]!r}; "
            "was the run made by a script with a model of its own? Then load weights.safetensors there"
        )
    model.load_state_dict(weights)
    return model.eval()


def load_tokenizer(run_dir: str | Path) -> Tokenizer:
    """What the run's tokens mean: the tokenizer of its index, or bytes."""
    data = _config(Path(run_dir)).data
    path = next(iter(data.sources.values())) if data.sources else data.path
    if path is None or not is_token_index(path):
        return ByteTokenizer()
    index = TokenIndexFile(path)
    return restore(index.tokenizer, index.tokenizer_file())


def generate(
    model: GPT, prompt: str, tokens: int, temperature: float, seed: int, tokenizer: Tokenizer | None = None
) -> str:
    """The prompt continued by `tokens` tokens (default: bytes); the same seed on the same machine gives the same
    text."""
    if not prompt:
        raise ConfigError("--prompt is empty; the model needs at least one character to continue")
    tokenizer = tokenizer or ByteTokenizer()
    (prompt_ids,) = tokenizer.encode([prompt.encode()])
    ids_1T = torch.from_numpy(prompt_ids.astype(np.int64))[None]
    generator = torch.Generator().manual_seed(seed)
    continued = model.generate(ids_1T, tokens, temperature, generator)[0].numpy()
    return tokenizer.decode(continued[continued < tokenizer.vocab_size])


def _config(folder: Path) -> TrainerConfig:
    """What the run was configured as, as its workers wrote it when they began."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {CONFIG_NAME}, which a run of the built-in trainer writes when its workers begin; give "
            "such a run, or wait until this one has begun"
        )
    return TrainerConfig.from_dict(own_loop.moved(read_yaml(path)))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint; a run that went on after its end has newer ones than it had exported."""
    exported = folder / WEIGHTS_NAME
    found = _checkpoint_weights(folder / "checkpoints")
    if found is not None:
        return found
    if not exported.is_file():
        raise ConfigError(
            f"{folder} holds neither {WEIGHTS_NAME} nor a checkpoint yet; let the run reach its first checkpoint, or "
            "stop it, which saves one"
        )
    try:
        return load_file(exported)
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupt(f"{exported} cannot be read ({error}); resume the run to write it anew") from error


def _checkpoint_weights(folder: Path) -> dict[str, torch.Tensor] | None:
    """The model's part of the newest checkpoint that is whole; None if there is none."""
    from elastic_harness.checkpoint.disk import local

    for checkpoint in local.newest(folder) if folder.is_dir() else []:
        try:
            _, tensors, _ = local.load(checkpoint)
        except CheckpointCorrupt as error:
            print(f"skipping a damaged checkpoint: {error}", file=sys.stderr)
            continue
        prefix = "model."
        return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
    return None


def main(argv: list[str] | None = None) -> int:
    """Print the prompt and what the model makes of it."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness generate", description="Sample text from a run of the built-in trainer."
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its id below runs/")
    parser.add_argument("--prompt", default="def ", help="what to continue (default: %(default)r)")
    parser.add_argument(
        "--tokens", type=int, default=200, help="how many tokens (by default bytes) to add (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the drawing (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = parser.parse_args(argv)
    try:
        if arguments.tokens < 0 or arguments.temperature < 0:
            raise ConfigError("--tokens and --temperature must be at least 0")
        folder = of_run(arguments.run, CONFIG_NAME)[0]
        torch.set_num_threads(1)  # more only wait for each other on a model and a batch this small
        text = generate(
            load_model(folder),
            arguments.prompt,
            arguments.tokens,
            arguments.temperature,
            arguments.seed,
            load_tokenizer(folder),
        )
    except HarnessError as error:
        print(f"elastic-harness generate: {error}", file=sys.stderr)
        return error.exit_code
    fields = ("prompt", "tokens", "temperature", "seed")
    told = {"run": str(folder), **{name: getattr(arguments, name) for name in fields}, "text": text}
    try:
        print(json.dumps(told) if arguments.json else text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_SUCCESS
