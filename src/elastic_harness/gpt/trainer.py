"""The built-in trainer: a small GPT on the user's own text. An ordinary user of `elastic_harness.start`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_harness import ConfigError, Mixture, ResumableDataset, Validation, start, total_steps
from elastic_harness.data.corpus import Corpus
from elastic_harness.data.token_index import TokenIndexFile, is_token_index
from elastic_harness.data.windows import NO_LABEL, Index
from elastic_harness.gpt import command_line
from elastic_harness.gpt.config import VALIDATION, TrainerConfig
from elastic_harness.gpt.model import GPT


def train(config: TrainerConfig, run_dir: str | None = None) -> None:
    """Train until the end that `training` gives; returns when all workers are done."""
    seed_all(config.seed)
    device = choose_device(config.trainer.device)
    dataset, origin = open_dataset(config)
    model = GPT(config.model, seed=config.seed).to(device)
    optimizer = make_optimizer(config, model)
    scheduler = make_scheduler(config, optimizer, dataset)
    decay, every = config.trainer.ema_decay, config.trainer.eval_interval_steps
    forward = torch.compile(model) if config.trainer.compile else model

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with autocast(config, device):
            return cross_entropy(forward, batch, device)

    def measure(index: int) -> tuple[float, int]:
        batch = dataset.validation_batch(index, config.training.micro_batch_samples)
        labels = labels_in(batch)
        return (float(loss_of(batch)), labels) if labels else (0.0, 0)

    run = start(
        model,
        optimizer,
        dataset,
        _Obeyed(**vars(config)),
        scheduler=scheduler,
        scaler=torch.amp.GradScaler(device.type) if config.trainer.precision == "fp16" else None,
        ema=averaged(model, decay) if decay else None,
        run_dir=run_dir,
        validation=Validation(measure, config.trainer.eval_batches, every, VALIDATION) if every else None,
    )
    if run.rank == 0:
        print(
            f"{model.num_parameters():,} parameters, {len(dataset):,} samples of {config.data.seq_length} tokens from "
            f"{origin}, "
            f"{config.training.global_batch_samples * config.data.seq_length:,} tokens a step",
            flush=True,
        )

    began_at, samples = time.perf_counter(), 0
    for step in run.steps():
        for batch in step.micro_batches():
            weight = labels_in(batch) / (config.training.micro_batch_samples * config.data.seq_length)
            step.backward(partial(loss_of, batch), weight=weight)
        samples += step.samples
        if run.rank == 0 and step.validation is not None:
            print(validation_line(step.index, step.validation), flush=True)
        if run.step % config.trainer.log_interval_steps == 0:
            tokens_per_s = samples * config.data.seq_length / (time.perf_counter() - began_at)
            if run.rank == 0:
                print(
                    f"step {run.step:>5}  loss {step.loss:.4f}  lr {step.lr:.3g}  {tokens_per_s:,.0f} tokens/s  "
                    f"workers {run.world_size}",
                    flush=True,
                )
            began_at, samples = time.perf_counter(), 0
    if run.rank == 0 and run.validation is not None:
        print(validation_line(run.step, run.validation), flush=True)


def validation_line(step: int, loss: float) -> str:
    return f"step {step:>5}  validation loss {loss:.4f}"


class _Obeyed(TrainerConfig):
    """The configuration as `start` gets it: this program does what its sections say."""

    def unread(self) -> list[str]:
        return []

    def fingerprint(self) -> dict[str, Any]:
        return {"run.precision": self.trainer.precision, "compile": self.trainer.compile}


def open_dataset(config: TrainerConfig) -> tuple[ResumableDataset, str]:
    """The data that `data.path` names, and where it comes from in words. Raises ConfigError if the model does not know
    all of its tokens."""
    data = config.data
    given: dict[str, Any]
    if data.sources is not None:
        given, origin = {"mixture": mixture_of(config, data.sources)}, f"a mixture of {', '.join(data.sources)}"
    elif data.path is not None and is_token_index(data.path):
        index = TokenIndexFile(data.path)
        given, origin = {"index_file": index}, f"{data.path} (fingerprint {index.fingerprint[:16]})"
    elif data.documents == "join":
        corpus = Corpus.open(data.path)
        given, origin = {"index_file": corpus}, f"{corpus.name} (sha256 {corpus.sha256[:16]})"
    else:
        raise ConfigError(
            f"data.documents is {data.documents!r}, but a text is one stream of bytes; give a token index "
            "(elastic-harness index build) as data.path."
        )
    dataset = ResumableDataset(
        **given,
        seq_length=data.seq_length,
        seed=config.seed,
        documents=data.documents,
        validation_fraction=data.validation_fraction,
    )
    check_vocabulary(config, dataset.index)
    return dataset, origin


def mixture_of(config: TrainerConfig, sources: dict[str, str]) -> Mixture:
    """The mixture of `data.sources`; its weights change with the first sample of the steps in `data.weight_changes`."""
    data, batch = config.data, config.training.global_batch_samples
    changes = {int(step) * batch: weights for step, weights in (data.weight_changes or {}).items()}
    return Mixture(sources, data.weights or dict.fromkeys(sources, 1.0), changes)


def check_vocabulary(config: TrainerConfig, index: Index) -> None:
    """Raises ConfigError if the model does not know all tokens of an index."""
    if index.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but the tokens of {index.path} are up to "
            f"{index.vocab_size - 1}; use model.vocab_size={-(-index.vocab_size // 64) * 64} or more."
        )


def labels_in(batch: dict[str, Tensor]) -> int:
    """How many labels a micro-batch has."""
    return int((batch["labels"] != NO_LABEL).sum()) if "document_ids" in batch else batch["labels"].numel()


def cross_entropy(model: Any, batch: dict[str, Tensor], device: torch.device) -> Tensor:
    """Mean loss over the labels of a micro-batch."""
    batch = {name: values.to(device) for name, values in batch.items()}
    documents = (batch["document_ids"],) if "document_ids" in batch else ()
    logits_BTV = model(batch["input_ids"], *documents)
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), ignore_index=NO_LABEL)


def make_optimizer(config: TrainerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices only."""
    o = config.optimizer
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": o.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if o.name == "sgd":
        return torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov)
    kind = torch.optim.AdamW if o.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=o.lr, betas=o.betas, eps=o.eps, foreach=True)


def make_scheduler(
    config: TrainerConfig, optimizer: torch.optim.Optimizer, dataset: ResumableDataset
) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up, then cosine or linear decay to `min_lr_ratio`, or constant."""
    s = config.scheduler
    steps = 0 if s.name == "constant" else total_steps(config, dataset)
    warmup = s.warmup_steps or 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        if s.name == "constant":
            return 1.0
        shape = 0.5 * (1 + math.cos(math.pi * done)) if s.name == "cosine" else 1 - done
        return s.min_lr_ratio + (1 - s.min_lr_ratio) * shape

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def averaged(model: nn.Module, decay: float) -> torch.optim.swa_utils.AveragedModel:
    """An exponential moving average of the weights."""
    return torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), use_buffers=True
    )


def autocast(config: TrainerConfig, device: torch.device) -> AbstractContextManager[Any]:
    if config.trainer.precision == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if config.trainer.precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype)


def choose_device(wanted: str) -> torch.device:
    """The device named in the configuration; `auto` takes this worker's GPU if there is one."""
    import os

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise command_line.no_gpu(f"torch {torch.__version__} sees no GPU here")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def seed_all(seed: int) -> None:
    """Seed what builds the model, alike on every worker."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def main(argv: Sequence[str] | None = None) -> None:
    train(*command_line.read(argv))
