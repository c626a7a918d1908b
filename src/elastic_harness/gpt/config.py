"""The built-in trainer's settings: a `Config` with sections of its own. Imports neither torch nor numpy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from elastic_harness import own_loop
from elastic_harness.config import Config
from elastic_harness.typed import Section, nearest_multiple, setting_error

VALIDATION = "val_loss"
"""Under which name checkpoints and events have the loss over held-out batches."""


@dataclass(frozen=True)
class LoopConfig(Section):
    """The built-in trainer's loop: where and how it computes, and what it says between the steps."""

    section: ClassVar[str] = "trainer"

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of forward and backward; the weights are fp32
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    compile: bool = False  # torch.compile
    eval_interval_steps: int = 0  # 0: no validation loss
    eval_batches: int = 8  # in one validation
    log_interval_steps: int = 1  # between two lines of output
    ema_decay: float | None = None  # null: no moving average of the weights
    # where `elastic-harness launch` shows the run, as with its --track; docs/tracking.md
    tracking: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "otel"], ...] = ()

    def check(self) -> None:
        self._at_least(1, "eval_batches", "log_interval_steps")
        self._at_least(0, "eval_interval_steps")
        self._require(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay", "must lie between 0 and 1")


@dataclass(frozen=True)
class DataConfig(Section):
    """The built-in trainer's text."""

    section: ClassVar[str] = "data"

    path: str | None = None  # a text file, a folder of them, a token index; null: the Python standard library's source
    sources: dict[str, str] | None = None  # in place of path, a mixture: token indexes by name
    weights: dict[str, float] | None = None  # of the sources; null: all equal
    weight_changes: dict[str, dict[str, float]] | None = None  # other weights from a step on
    documents: Literal["join", "separate", "pack"] = "join"  # of a token index: whether windows respect documents
    seq_length: int = 128  # tokens in a sample
    validation_fraction: float = 0.05  # held out: of an index whole documents, of a text pieces of 16 KiB

    def check(self) -> None:
        self._at_least(1, "seq_length")
        self._require(0 <= self.validation_fraction < 1, "validation_fraction", "must be at least 0 and below 1")
        self._require(self.path != "", "path", "must name a file or a folder", "or leave it out")
        if self.sources is None:
            for name in ("weights", "weight_changes"):
                self._require(getattr(self, name) is None, name, "needs data.sources, the indexes by name")
            return
        self._require(len(self.sources) > 0, "sources", "must name at least one index")
        self._require(self.path is None, "path", "cannot be given with data.sources", "leave one of them out")
        for name, weights in (("weights", [self.weights]), ("weight_changes", (self.weight_changes or {}).values())):
            unknown = sorted({key for given in weights for key in given or {}} - set(self.sources))
            self._require(not unknown, name, f"may only name sources ({', '.join(self.sources)}), not {unknown}")
        for step in self.weight_changes or {}:
            fits = step.isdecimal() and int(step) > 0
            self._require(fits, "weight_changes", "must have whole steps of at least 1 for keys")


@dataclass(frozen=True)
class ModelConfig(Section):
    """The built-in GPT's size."""

    section: ClassVar[str] = "model"

    vocab_size: int = 256  # 256: bytes
    n_layer: int = 4  # transformer blocks
    n_head: int = 4  # attention heads
    d_model: int = 128  # width of the residual stream
    mlp_ratio: int = 4  # width of the MLP in units of d_model
    dropout: float = 0.0  # of attention and residuals
    tie_weights: bool = True  # the output layer is the embedding
    context_length: int | None = None  # longest text seen at once; null: data.seq_length

    def check(self) -> None:
        self._at_least(1, "vocab_size", "n_layer", "n_head", "d_model", "mlp_ratio", "context_length")
        self._require(0 <= self.dropout < 1, "dropout", "must be at least 0 and below 1")
        self._require(
            self.d_model % (2 * self.n_head) == 0,
            "d_model",
            f"must be a multiple of 2 * model.n_head = {2 * self.n_head} (heads of even width)",
            f"use for example {nearest_multiple(self.d_model, 2 * self.n_head)}",
        )


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The built-in trainer's optimizer."""

    section: ClassVar[str] = "optimizer"

    name: Literal["adamw", "adam", "sgd"] = "adamw"  # torch.optim's
    lr: float = 3e-4  # the highest learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # adamw and adam
    eps: float = 1e-8  # adamw and adam
    weight_decay: float = 0.1  # of matrices; vectors have none
    momentum: float = 0.0  # sgd
    nesterov: bool = False  # sgd

    def check(self) -> None:
        self._positive("lr", "eps")
        self._at_least(0, "weight_decay")
        self._require(all(0 <= b < 1 for b in self.betas), "betas", "must both be at least 0 and below 1")
        self._require(0 <= self.momentum < 1, "momentum", "must be at least 0 and below 1")
        self._require(not self.nesterov or self.momentum > 0, "nesterov", "needs optimizer.momentum greater than 0")


@dataclass(frozen=True)
class SchedulerConfig(Section):
    """The built-in trainer's learning rate over the steps."""

    section: ClassVar[str] = "scheduler"

    name: Literal["cosine", "linear", "constant"] = "cosine"  # the way down, after the warm-up
    warmup_steps: int | None = None  # null: 20, or a tenth of training.max_steps if that is less
    min_lr_ratio: float = 0.1  # of optimizer.lr, at the last step

    def check(self) -> None:
        self._at_least(0, "warmup_steps")
        self._require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "must lie between 0 and 1")


@dataclass(frozen=True)
class TrainerConfig(Config):
    """All that the built-in trainer needs to know. A loop of one's own may load it, but not set its sections."""

    trainer: LoopConfig = field(default_factory=LoopConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def check(self) -> None:
        super().check()
        if self.model.context_length is None:
            resolved = dataclasses.replace(self.model, context_length=self.data.seq_length)
            object.__setattr__(self, "model", resolved)
        context_length = self.model.context_length
        if context_length is not None and context_length < self.data.seq_length:
            raise setting_error(
                "model.context_length",
                context_length,
                f"must be at least data.seq_length={self.data.seq_length}",
                "leave it out to have it follow data.seq_length",
            )
        if self.model.vocab_size < 256:
            raise setting_error("model.vocab_size", self.model.vocab_size, "must be at least 256: the tokens are bytes")
        steps = self.training.steps_known
        if self.data.weight_changes and (self.training.batch_schedule or self.slots_per_worker):
            raise setting_error(
                "data.weight_changes",
                self.data.weight_changes,
                "counts in steps of one size, and the batch changes",
                "leave out one of them",
            )
        if self.scheduler.warmup_steps is None:
            warmup_steps = 20 if steps is None else min(20, steps // 10)
            object.__setattr__(self, "scheduler", dataclasses.replace(self.scheduler, warmup_steps=warmup_steps))
        elif steps is not None and self.scheduler.warmup_steps > steps:
            raise setting_error(
                "scheduler.warmup_steps",
                self.scheduler.warmup_steps,
                f"must not exceed training.max_steps={steps}",
                "lower the one or raise the other",
            )

    def unread(self) -> list[str]:
        unset = TrainerConfig(self.seed, self.training, self.elastic, self.checkpoint)
        return super().unread() + [
            own_loop.refusal(f"{section}.{name}", value)
            for section in own_loop.SECTIONS
            for name, value in vars(getattr(self, section)).items()
            if value != getattr(getattr(unset, section), name)
        ]
