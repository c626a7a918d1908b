"""`ElasticTrainer`: a `transformers.Trainer` whose loop is that of the harness."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, speed_metrics

import elastic_harness
from elastic_harness import Config, ConfigError
from elastic_harness.errors import UserCodeError
from elastic_harness.hf import environment
from elastic_harness.hf.record import TrainerRecord, Watcher, begin_as_rank_0
from elastic_harness.hf.refusals import check_settings, refuse_arguments, refuse_parts
from elastic_harness.hf.samples import Samples
from elastic_harness.hf.trained_part import TrainedPart, frozen_word


class ElasticTrainer(Trainer):
    """A Trainer whose workers may die, join and leave, with the same final weights, bit for bit.

    It takes what `transformers.Trainer` takes. A slot is `per_device_train_batch_size` samples, and a step is
    `gradient_accumulation_steps` slots **on all workers together**: the batch does not depend on their number.

    elastic: further settings of the harness by section, as in `{"checkpoint": {"checkpoint_interval": 100}}`.
    run_dir: where ledger and checkpoints go when there is no launcher to say so; default: `output_dir/run`.

    Raises ConfigError for arguments, callbacks and overrides that cannot be followed, each with what to do instead.
    """

    model: Any
    optimizer: Any
    args: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        elastic: Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        **named: Any,
    ) -> None:
        if args is not None:
            refuse_arguments(args)
        check_settings(elastic or {})
        super().__init__(model, args, *more, **named)
        refuse_parts(self, ElasticTrainer)
        self._elastic = dict(elastic or {})
        self._run_dir = run_dir
        self._watcher = Watcher()

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **named: Any) -> TrainOutput:
        """Train to the end that the arguments give. A run that was interrupted goes on where it was, with or without
        `resume_from_checkpoint=True`. Collective; returns on all workers that are there at the end, leaves the process
        of one that is not needed any more."""
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            raise ConfigError(
                f"train(resume_from_checkpoint={str(resume_from_checkpoint)!r}): a folder of Hugging Face's has no "
                "exact state. A run goes on by itself when it is started again with the same run folder; to begin a "
                "new run with these weights, load the model from there with from_pretrained()."
            )
        return super().train(None, *more, **named)

    def hyperparameter_search(self, *given: Any, **named: Any) -> Any:
        """Refused: a process takes part in one run."""
        raise ConfigError(
            "hyperparameter_search() trains several times in one process, but a worker takes part in one run. Start "
            "one run per trial, each with its own folder."
        )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """What `Trainer.train` calls when all is prepared, in its own loop's place."""
        refuse_arguments(self.args)
        refuse_parts(self, ElasticTrainer)
        args = self.args
        args._n_gpu = min(1, args.n_gpu)
        if getattr(args, "gradient_checkpointing", False) and hasattr(self.model, "gradient_checkpointing_enable"):
            self.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        self.accelerator.free_memory()
        samples = self._samples()
        batches = math.ceil(len(samples) / args.per_device_train_batch_size)  # in an epoch
        steps_per_epoch = math.ceil(batches / args.gradient_accumulation_steps)
        max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)

        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self.model_wrapped = self.accelerator.prepare_model(self.model)  # autocast and compilation
        self.current_gradient_accumulation_steps = 1
        self._tokens_in_full_slot = self._count_full_slot(samples)
        self._begin_state(max_steps, math.ceil(max_steps / steps_per_epoch))
        record = TrainerRecord(self)
        run = self._start(samples, max_steps, record)
        self._call_around_optimizer()
        self._begin_training(run, record, trial, ignore_keys_for_eval)

        began_at, first_step = time.time(), run.step
        after_step = partial(self._after_step, run, record, batches, steps_per_epoch, trial, ignore_keys_for_eval)
        if record.pending is not None:  # an exception has ended that half-way
            after_step()
        for step in run.steps():
            self._follow_rank(run)
            if step.index % steps_per_epoch == 0:
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self.model.train()
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            for inputs in step.micro_batches():
                items = self._items(inputs)
                weight = None if items is None else float(items) / self._tokens_in_full_slot
                step.backward(partial(self._slot_loss, inputs, items), weight)
            record.note_loss(step.loss)
            self._follow_rank(run)
            after_step()
        self._follow_rank(run)
        return self._finish_training(record, first_step, began_at, len(samples) / steps_per_epoch)

    def _after_step(
        self,
        run: Any,
        record: TrainerRecord,
        batches: int,
        steps_per_epoch: int,
        trial: Any,
        ignore_keys: list[str] | None,
    ) -> None:
        """Do what follows a commit. batches: in an epoch."""
        epoch, index = divmod(run.step - 1, steps_per_epoch)
        self.state.global_step = run.step
        self.state.epoch = epoch + min(1.0, (index + 1) * self.args.gradient_accumulation_steps / batches)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._log_evaluate_save(record, trial, ignore_keys)
        if index + 1 == steps_per_epoch or run.step == self.state.max_steps:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._log_evaluate_save(record, trial, ignore_keys)
        self._obey_control(run)
        record.note_done()

    def _samples(self) -> Samples:
        dataset, collator = self.train_dataset, self.data_collator
        if dataset is None:
            raise ConfigError("train() needs a train_dataset; give ElasticTrainer one.")
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        return Samples(dataset, collator)

    def _items(self, inputs: Any) -> Tensor | int | None:
        """How many target tokens a batch has, counted as the Trainer does; None: its loss is a mean over samples."""
        return self.get_batch_samples(iter([inputs]), 1, self.args.device)[1]

    def _count_full_slot(self, samples: Samples) -> float:
        """Return the weight that is 1: the target tokens of a slot of the first samples. Another number would do as
        well; with this one the loss of a slot of packed samples is not multiplied at all."""
        set_seed(self.args.seed)  # a collator may draw masks
        first = samples.read(range(min(len(samples), self.args.per_device_train_batch_size)))
        items = self._items(first)
        return 1.0 if items is None else max(1.0, float(items))

    def _slot_loss(self, inputs: dict[str, Any], items: Tensor | int | None) -> Tensor:
        """The loss of a slot: the mean over its target tokens."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model_wrapped, self._prepare_inputs(inputs), num_items_in_batch=items)
            return cast(Tensor, loss)

    # ---- beginning

    def _start(self, samples: Samples, max_steps: int, record: TrainerRecord) -> Any:
        frozen = frozen_word(self.model)
        facts = {
            "hf.transformers": transformers.__version__,
            "hf.precision": self.accelerator.mixed_precision,
            "hf.compile": bool(self.args.torch_compile),
            "hf.tokens_in_full_slot": self._tokens_in_full_slot,
            "hf.label_smoothing": self.args.label_smoothing_factor,
            "hf.neftune": self.args.neftune_noise_alpha,
            "hf.frozen_parameters": frozen,
        }
        config = _with_facts(Config.from_dict(self._settings(max_steps)), facts)
        scaled = self.accelerator.mixed_precision == "fp16"
        with environment.shown():
            run = elastic_harness.start(
                TrainedPart(self.model) if frozen else self.model,
                self.optimizer,
                samples,
                config,
                scheduler=self.lr_scheduler,
                scaler=torch.amp.GradScaler(self.args.device.type) if scaled else None,
                extra={"trainer": record},
                run_dir=self._run_dir or Path(self.args.output_dir) / "run",
                policies=[self._watcher],
            )
        slots, samples_in_slot = self.args.gradient_accumulation_steps, self.args.per_device_train_batch_size
        enough = slots * run.world_size
        if run.step == 0 and run.world_size > slots:
            raise ConfigError(
                f"There are {run.world_size} workers, but a step has {slots} micro-batches: "
                f"gradient_accumulation_steps={slots} counts those of all workers together. With "
                f"gradient_accumulation_steps={enough} a step has {samples_in_slot * enough} samples, as many as so "
                "many processes under torchrun would take."
            )
        if run.rank == 0:
            where = f"; goes on after step {run.step}, as {run.run_dir} has it" if run.step else ""
            if run.step == max_steps:
                where = f"; {run.run_dir} has all of them: to train anew, take another folder"
            print(
                f"elastic-harness: {slots * samples_in_slot} samples a step, in {slots} micro-batches of "
                f"{samples_in_slot}, on all workers together; {max_steps} steps{where}",
                flush=True,
            )
        return run

    def _settings(self, max_steps: int) -> dict[str, Any]:
        """All settings of the harness, as plain values."""
        args = self.args
        training = {
            **self._elastic.get("training", {}),
            "max_steps": max_steps,
            "micro_batch_samples": args.per_device_train_batch_size,
            "global_batch_samples": args.per_device_train_batch_size * args.gradient_accumulation_steps,
            "clip_norm": args.max_grad_norm or None,
        }
        return {**self._elastic, "seed": args.seed, "training": training}

    def _begin_state(self, max_steps: int, epochs: int) -> None:
        stateful = [c for c in (*self.callback_handler.callbacks, self.control) if isinstance(c, ExportableState)]
        self.state = TrainerState(stateful_callbacks=stateful)  # type: ignore[arg-type]
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self.state.max_steps, self.state.num_train_epochs = max_steps, epochs
        self.state.epoch = 0.0

    def _begin_training(self, run: Any, record: TrainerRecord, trial: Any, ignore_keys: list[str] | None) -> None:
        """Tell the callbacks; what they keep was restored before, and is again in place after that."""
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        self._set_rank(run.rank)
        restored = record.state_dict()
        self.control = handler.on_train_begin(self.args, self.state, self.control)
        record.load_state_dict(restored)
        if run.step == 0 and self.args.eval_on_start:
            self._evaluate(trial, ignore_keys, skip_scheduler=True)

    def _call_around_optimizer(self) -> None:
        """The optimizer steps inside the commit, with the gradient of the whole step, on every worker."""
        handler = self.callback_handler

        def before(*_: Any) -> None:
            self.control = handler.on_pre_optimizer_step(self.args, self.state, self.control)

        def after(*_: Any) -> None:
            self.control = handler.on_optimizer_step(self.args, self.state, self.control)

        self._hooks = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(after),
        ]

    # ---- rank 0

    def _follow_rank(self, run: Any) -> None:
        """Whoever is rank 0 now logs and saves."""
        was_first = self.state.is_world_process_zero
        self._set_rank(run.rank)
        if self.state.is_world_process_zero and not was_first:
            handler = self.callback_handler
            objects = {name: getattr(handler, name) for name in ("model", "optimizer", "lr_scheduler")}
            begin_as_rank_0(handler.callbacks, self.args, self.state, self.control, **objects)

    def _set_rank(self, rank: int) -> None:
        """`args.process_index` and what follows from it. For Accelerate this process stays the only one."""
        processes = self.args.distributed_state
        processes.process_index = processes.local_process_index = rank
        self.state.is_world_process_zero = self.state.is_local_process_zero = rank == 0

    # ---- after a step

    def _log_evaluate_save(self, record: TrainerRecord, trial: Any, ignore_keys: list[str] | None) -> None:
        """Do what the callbacks have asked for. All workers evaluate, so all know the metric."""
        if self.control.should_log and self.state.global_step > record.logged_at:
            logs = {"loss": record.take_mean(self.state.global_step)}
            facts = self._watcher.facts
            if facts is not None:
                logs |= {"grad_norm": facts.grad_norm, "learning_rate": facts.lr}
            self.log(logs)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys)
            best = self._determine_best_metric(metrics=metrics, trial=trial)
            if str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) == "best":
                self.control.should_save = best
        if self.control.should_save:
            self._save_checkpoint(self.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False

    def _obey_control(self, run: Any) -> None:
        if self.control.should_epoch_stop:
            raise UserCodeError(
                f"A callback has set should_epoch_stop after step {run.step}, but every sample of an epoch is used "
                "exactly once. Set should_training_stop, or give fewer samples."
            )
        if self.control.should_training_stop and run.step < self.state.max_steps:
            run.stop("a callback has set should_training_stop")

    # ---- saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the weights in Hugging Face's layout, on rank 0. The exact state is in the run's own checkpoints."""
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.best_global_step:
            best = folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if self.state.best_global_step == self.state.global_step or best.exists():
                self.state.best_model_checkpoint = str(best)
        if not self.args.should_save:
            return
        staged = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(staged, ignore_errors=True)  # of a rank 0 that died here
        self.save_model(str(staged), _internal_call=True)
        self.state.save_to_json(str(staged / "trainer_state.json"))
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
        self._drop_old_checkpoints()

    def _drop_old_checkpoints(self) -> None:
        """Keep `save_total_limit` folders: the newest, and the best."""
        limit = self.args.save_total_limit
        if not limit or limit < 1:
            return
        named = {p: p.name.rpartition("-")[2] for p in Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
        folders = sorted((p for p, number in named.items() if number.isdigit()), key=lambda p: int(named[p]))
        best = self.state.best_model_checkpoint
        kept = [p for p in folders if str(p) == best]
        kept += [p for p in reversed(folders) if p not in kept][: max(limit - len(kept), 1)]
        for folder in folders:
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _finish_training(
        self, record: TrainerRecord, first_step: int, began_at: float, samples_per_step: float
    ) -> TrainOutput:
        for hook in self._hooks:
            hook.remove()
        steps = self.state.global_step - first_step
        loss = (record.loss_logged + record.loss_sum) / max(1, self.state.global_step)
        metrics = speed_metrics("train", began_at, num_samples=round(samples_per_step * steps), num_steps=steps)
        metrics["train_loss"] = loss
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if getattr(self, "neftune_hook_handle", None) is not None:
            self.neftune_hook_handle.remove()
        self.is_in_train = False
        return TrainOutput(self.state.global_step, loss, metrics)


def _with_facts(config: Config, facts: dict[str, Any]) -> Config:
    """Return the configuration with what `start` cannot see, and bits depend on."""

    class HuggingFaceConfig(Config):
        def fingerprint(self) -> dict[str, Any]:
            return facts

    return HuggingFaceConfig(**vars(config))
