"""What a Trainer offers and what cannot be exact with workers that come and go: each with the reason, and what to do
instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from elastic_harness import ConfigError

_REPLICAS = "a model that is spread over processes or devices by it is not replicated, and the harness trains replicas"
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "deepspeed": (None, f"{_REPLICAS}. Leave it out; the optimizer's state is whole on each worker"),
    "parallelism_config": (None, f"{_REPLICAS}. Leave it out"),
    "auto_find_batch_size": (
        False,
        "the micro-batch is a part of what a step is, and must not shrink on one worker. Leave it out: a slot that "
        "runs out of memory is computed again, then by another worker",
    ),
    "group_by_length": (
        False,
        "the order of samples is a function of the seed and the epoch, which can be verified without reading the data. "
        "Pack samples to equal lengths instead",
    ),
    "train_sampling_strategy": (
        "random",
        "the order of samples is a function of the seed and the epoch, which can be verified without reading the data. "
        "Leave it out; pack samples to equal lengths instead of grouping them, shuffle the dataset once if its order "
        "shall not depend on args.seed",
    ),
    "dataloader_drop_last": (
        False,
        "each sample is used exactly once in each epoch. Leave it out: the last step of an epoch is short, and "
        "weighted as it is",
    ),
    "ignore_data_skip": (False, "a run that resumes would use samples twice. Leave it out: resuming costs nothing"),
    "include_num_input_tokens_seen": (
        ("no", False),
        "a worker sees its own micro-batches only. Leave it out; on_log has the samples in `epoch`",
    ),
    "push_to_hub": (
        False,
        "each worker that becomes rank 0 would push. Call trainer.push_to_hub() after train(), "
        "if trainer.is_world_process_zero()",
    ),
    "enable_jit_checkpoint": (
        False,
        "the agent handles SIGTERM: the node is drained, and others go on. Leave it out",
    ),
    "save_on_each_node": (
        False,
        "rank 0 alone saves. Leave it out; put output_dir on a file system that all nodes see",
    ),
}
"""By argument: the values that are allowed (one, or a tuple), and the reason for it."""
_OPTIMIZERS = {
    "lomo": "it updates weights in backward, before the sum over all workers is known",
    "layerwise": "it updates weights in backward, before the sum over all workers is known",
    "schedule_free": "it swaps other weights in for an evaluation, and between two commits weights may only be read",
}
_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_METHODS = {
    "training_step": "override compute_loss: the backward is the harness's",
    "get_train_dataloader": "give train_dataset and data_collator: slots read their samples by number",
    "_get_train_sampler": "leave it out: the order is a function of the seed",
    "get_batch_samples": "leave it out: a slot is one batch",
    "_maybe_log_save_evaluate": "use callbacks",
    "_save_checkpoint": "override save_model",
    "hyperparameter_search": "start one run per trial",
}


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise ConfigError for the first argument that cannot be followed."""
    if args.world_size > 1:
        raise ConfigError(
            f"TrainingArguments found {args.world_size} processes: they were made before elastic_harness.hf was "
            "imported, and Accelerate took the launcher's variables for a process group. Import ElasticTrainer at the "
            "top of the script."
        )
    if args.fsdp:
        raise ConfigError(f"TrainingArguments(fsdp={args.fsdp!r}) cannot be followed: {_REPLICAS}. Leave it out.")
    for name, (allowed, reason) in _ARGUMENTS.items():
        value = getattr(args, name, allowed)
        if value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
            raise ConfigError(f"TrainingArguments({name}={_plain(value)!r}) cannot be followed: {reason}.")
    if args.data_seed not in (None, args.seed):
        raise ConfigError(
            f"TrainingArguments(data_seed={args.data_seed}, seed={args.seed}): one seed gives the order, dropout and "
            "all else of a run. Leave data_seed out."
        )
    optimizer, schedule = str(_plain(args.optim)), str(_plain(args.lr_scheduler_type))
    for part, reason in _OPTIMIZERS.items():
        if part in optimizer:
            raise ConfigError(f"TrainingArguments(optim={optimizer!r}) cannot be followed: {reason}. Use adamw_torch.")
    if schedule in _SCHEDULES:
        raise ConfigError(
            f"TrainingArguments(lr_scheduler_type={schedule!r}) cannot be followed: the learning rate is a part of the "
            "commit, which knows no validation. Use a schedule over steps."
        )


def refuse_parts(trainer: Trainer, base: type[Trainer]) -> None:
    """Raise ConfigError for a model, an override or a callback that cannot be followed. base: the class whose
    methods are in their place."""
    if len(set((getattr(trainer.model, "hf_device_map", None) or {}).values())) > 1:
        raise ConfigError(
            "The model was loaded with a device_map over several devices, but each worker holds the whole model on "
            'one. Leave device_map out, or use device_map={"": device}.'
        )
    for name, instead in _METHODS.items():
        if getattr(type(trainer), name, None) is not getattr(base, name, None):
            raise ConfigError(f"{type(trainer).__name__} overrides {name}(), which is not called: {instead}.")
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_substep_end is not TrainerCallback.on_substep_end:
            raise ConfigError(
                f"The callback {type(callback).__name__} has on_substep_end(), but which micro-batches a worker "
                "computes changes from step to step. Use on_step_end()."
            )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of the harness that TrainingArguments has."""
    ours = {
        "max_steps": "max_steps or num_train_epochs",
        "max_epochs": "num_train_epochs",
        "max_tokens": "max_steps",
        "micro_batch_samples": "per_device_train_batch_size",
        "global_batch_samples": "gradient_accumulation_steps, the number of micro-batches in a step on all workers",
        "clip_norm": "max_grad_norm",
    }
    training = settings.get("training")
    for name in training if isinstance(training, Mapping) else ():
        if name in ours:
            raise ConfigError(f"elastic= has training.{name}: give TrainingArguments {ours[name]} instead.")
    if "seed" in settings:
        raise ConfigError("elastic= has seed: give TrainingArguments(seed=…) instead.")


def _plain(value: Any) -> Any:
    """The value of an enumeration, else the value itself."""
    return getattr(value, "value", value)
