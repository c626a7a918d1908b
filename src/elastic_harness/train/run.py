"""The user's side of the loop: `start`, then `for step in run.steps(): for batch in step.micro_batches(): …`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from elastic_harness import failpoints, omissions, processes
from elastic_harness.comm import nccl, tcp
from elastic_harness.comm.pool import Pool
from elastic_harness.comm.rendezvous import KeyValue
from elastic_harness.comm.transport import Transport
from elastic_harness.config import Config
from elastic_harness.contract import variables
from elastic_harness.contract.board import Board, Phase
from elastic_harness.contract.checkpoint_event import CheckpointEvent
from elastic_harness.contract.messages import (
    EndAsked,
    LastStepDone,
    LogEvent,
    LoopLeft,
    ScriptError,
    SlotError,
    WeightsNotSaved,
)
from elastic_harness.data.mapstyle import MapStyle
from elastic_harness.errors import (
    EXIT_CONFIG,
    EXIT_INFRASTRUCTURE,
    EXIT_USER_CODE,
    ConfigError,
    Diverged,
    HarnessError,
    InfrastructureError,
    OutOfMemory,
    UserCodeError,
)
from elastic_harness.failpoints import failpoint
from elastic_harness.health.spikes import SpikePolicy
from elastic_harness.policies import UpdatePolicy
from elastic_harness.runs import origin as origins
from elastic_harness.runs import replayed
from elastic_harness.train import standalone
from elastic_harness.train.apply import Applier
from elastic_harness.train.batches import NAME as BATCHES
from elastic_harness.train.batches import Batches, check_omissions, data_of, scheduled, tokens_per_sample_of
from elastic_harness.train.boundary import described
from elastic_harness.train.deadlines import Deadlines
from elastic_harness.train.ending import left_by_hand, left_message
from elastic_harness.train.engine import Engine
from elastic_harness.train.export import export_weights
from elastic_harness.train.fingerprint import fingerprint
from elastic_harness.train.imports import late_settings, tell_imports
from elastic_harness.train.inherited import Inherited
from elastic_harness.train.layout import averaged_buffers, make_layout, optimized, state_buffers
from elastic_harness.train.link import AgentLink, Left, Link
from elastic_harness.train.loop import commit_step, measure_last, settle_commit
from elastic_harness.train.measures import Measures
from elastic_harness.train.memory import is_out_of_memory
from elastic_harness.train.nonfinite import SkipNonfinite
from elastic_harness.train.own_pace import OwnPace
from elastic_harness.train.policies import Policies
from elastic_harness.train.policies import settings as policy_settings
from elastic_harness.train.progress import Progress
from elastic_harness.train.recovery import recover
from elastic_harness.train.refusals import check_extra, check_model, check_names, check_state_dict, check_trainable
from elastic_harness.train.replay import check_beginning, check_program, saving_nothing
from elastic_harness.train.saver import make_saver
from elastic_harness.train.slots import SlotComputer
from elastic_harness.train.state import Registry, Stateful, weights_sha256
from elastic_harness.train.validation import Validation
from elastic_harness.train.watch import StateWatch

Connect = Callable[[KeyValue, int, int, Callable[[float], None]], Transport]


class Run:
    """One worker's part in a run. Made by `start`."""

    def __init__(self, engine: Engine, progress: Progress) -> None:
        self._engine = engine
        self._progress = progress
        self._closed = False
        self._in_step = False
        self._left_as = 0, 1  # rank and world size in the last generation, once it is left

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or self._engine.saver.alone:  # a process that has an agent is about to end
            self.close()

    @property
    def step(self) -> int:
        """Committed steps so far."""
        return self._progress.version

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation; it may change at any step. After the loop, that in the last."""
        return self._progress.formed.rank if self._progress.formed else self._left_as[0]

    @property
    def world_size(self) -> int:
        """Workers in the current generation; after the loop, in the last."""
        return self._progress.formed.world if self._progress.formed else self._left_as[1]

    @property
    def run_dir(self) -> Path:
        return self._engine.run_dir

    def stop(self, reason: str) -> None:
        """End the run before `training.max_steps`, on all workers after the same step: the one whose micro-batches are
        being computed, else the next one. Returns at once; the loop over `steps()` ends by itself, the weights are
        saved as at any end, and the job succeeds. One worker's call is enough, several are the same. Launched again,
        the run goes on from there until the script stops it again."""
        self._check_open()
        if not isinstance(reason, str) or not reason:
            raise UserCodeError(f"run.stop() was given {reason!r}; say in words why the run ends, for its records")
        if not self._over and self._engine.replay is None:  # the recorded run was gone on with
            self._engine.link.ask_to_stop(EndAsked(self._progress.version, reason))

    def report(self, **values: float) -> None:
        """Say how good the weights are that the last commit has left, as in `run.report(val_loss=2.31)`: one value
        each, the mean over all that was validated. `checkpoint.best_metric` names the value that the best checkpoints
        are chosen by; others may come with it. Call it in the loop between two steps. One worker's call is enough,
        several must say the same. Returns at once; before the next step all workers hear of it, and the checkpoint of
        this very version has it. If the only worker that reports dies before that, the report is lost: validations that
        must not be lost belong into `start(validation=…)`. Raises UserCodeError for what is no finite number, other
        names, or a call elsewhere."""
        self._check_open()
        given = self._engine.measures.check_report(values)
        if self._progress.formed is None:
            raise UserCodeError("run.report() was called after the last step was saved; report in the loop")
        if self._in_step:
            raise UserCodeError(
                f"run.report() was called in the middle of step {self._progress.version}: call it after the loop over "
                "step.micro_batches(), where the weights are those of a committed step"
            )
        known = self._progress.measured.reports
        for name, value in given.items():
            if known.setdefault(name, value) != value:
                raise UserCodeError(
                    f"run.report() was given {name}={value!r} for the weights after {self.step} steps, and "
                    f"{known[name]!r} before: report one value, the mean over all that was validated"
                )

    @property
    def validation(self) -> float | None:
        """The validation of the last step's weights, after the loop; None if it was not due then. In the loop a step
        has it: `Step.validation`."""
        return self._progress.measured.validation

    def log(self, event: str, **fields: Any) -> None:
        """Write an event of your own to events.jsonl, from rank 0 only."""
        if self.rank == 0:
            self._engine.link.send(LogEvent(event, fields))

    def steps(self) -> Iterator[Step]:
        """Every step that is still to be committed, up to `training.max_steps` or the one that `stop` made the last.
        Ends when all workers are done; leaves the process (exit code 0) when the job was asked to stop or this worker
        is no longer wanted. A loop that is left by break does not end the run: with other workers that is an error."""
        engine = self._engine
        try:
            while True:
                self._check_open()
                while not self._over:
                    step = Step(self)
                    try:
                        yield step
                    except GeneratorExit:
                        self._left_loop(step, sys._getframe(1))
                        raise
                    step.check_committed()
                    tell_imports(engine.link)
                self._finish()
        except Left as left:
            if not left.done or engine.replay is not None:
                self._leave(left)
            engine.saver.close()
            engine.applier.disown()
            self._disconnect()
            _open.pop(engine.run_dir.resolve(), None)

    @property
    def _over(self) -> bool:
        """Whether the last step is committed."""
        return self._progress.ended or self._progress.version >= self._engine.last_version

    def _left_loop(self, step: Step, frame: FrameType | None) -> None:
        """Say that `break` ends no run. A process that others wait for ends here; one that is alone may go on to
        `close`. After an exception nothing is said: that says more."""
        if self._closed or not left_by_hand(frame):
            return
        version = self._progress.version
        message = left_message(version, self._engine.last_version, committed=version > step.index)
        print(f"elastic-harness: {message}", file=sys.stderr, flush=True)
        if self._engine.saver.alone and self.world_size == 1:
            return
        self._engine.link.send(LoopLeft(message))
        _leave(EXIT_USER_CODE)

    def close(self) -> None:
        """Leave the run. Without a launcher the state of the last commit is saved first, so that the next `start` with
        this run_dir, in this process too, goes on from there; blocks until that is on disk. May be called again."""
        if self._closed:
            return
        self._closed = True
        _open.pop(self._engine.run_dir.resolve(), None)
        try:
            if self._engine.saver.alone:
                self._save()
        finally:
            _release(self._engine)
            self._disconnect()

    def _save(self) -> None:
        """Save an unfinished run's state, unless user code has changed it."""
        engine, version = self._engine, self._engine.watch.version
        formed = self._progress.formed
        if formed is None or version <= formed.digest.from_step:
            return
        engine.slots.undo_slot()
        try:
            engine.watch.checked_word("before close()")
        except UserCodeError as error:
            print(f"elastic-harness: step {version} is not saved: {error}", file=sys.stderr, flush=True)
            return
        describes = described(engine, replace(self._progress, version=version))
        engine.saver.save(version, formed.digest.lineage, describes)

    def _check_open(self) -> None:
        if self._closed:
            raise UserCodeError("this run was closed; call start() again with the same run_dir, which goes on with it")
        if self._engine.watch.version != self._progress.version:
            raise UserCodeError(
                f"this run was interrupted while step {self._progress.version} was committed; call start() again with "
                "the same run_dir, which goes on from there"
            )

    def _disconnect(self) -> None:
        """Let go of the connections to the other workers."""
        formed, exchange = self._progress.formed, self._progress.exchange
        if exchange is not None:
            exchange.wait_until_sent(self._engine.config.elastic.exchange_timeout_s)
        if formed is not None:
            self._left_as = formed.rank, formed.world
        if formed is not None and formed.transport is not None:
            self._engine.link.wake = lambda: None
            formed.transport.close()
        self._progress = replace(self._progress, formed=None, exchange=None)

    def _leave(self, left: Left) -> NoReturn:
        """End the process: this worker is not needed any more, and what follows the loop is for those who finished."""
        failpoint("leave.began", self._progress.version)
        self._engine.saver.close()
        self._disconnect()
        print(f"elastic-harness: {left.reason}", file=sys.stderr, flush=True)
        _leave(0)

    def _finish(self) -> None:
        """Save, say so, and keep serving until everybody is done."""
        self._engine.watch.checked_word("after the last step")
        self._progress = measure_last(self._engine, settle_commit(self._engine, self._progress))
        engine, progress = self._engine, self._progress
        formed = progress.formed
        assert formed is not None
        engine.board.show(Phase.CHECKPOINT, progress.version, deadline_s=engine.config.elastic.exchange_timeout_s)
        sha256 = weights_sha256(engine.registry.model)
        if formed.speaks and engine.replay is None:
            uploads = formed.rank == 0
            engine.saver.save(progress.version, formed.digest.lineage, described(engine, progress), uploads=uploads)
            try:
                export_weights(engine.registry.model, engine.run_dir / "weights.safetensors")
            except InfrastructureError as error:
                engine.link.send(WeightsNotSaved(str(error)))  # the folder is everybody's: nobody else would do better
                raise
        failpoint("finish.saved", progress.version)
        loss = progress.metrics.loss if progress.metrics else None
        engine.link.send(LastStepDone(progress.version, sha256, loss, self._stop_reason()))
        failpoint("finish.sent", progress.version)
        engine.board.show(Phase.FINISHED, progress.version)
        self._progress = recover(engine, progress, None)

    def _stop_reason(self) -> str | None:
        """Why the script ended the run, as far as this worker knows. None: it did not."""
        if not self._progress.ended:
            return None
        asked = self._engine.link.end_asked
        return asked.reason if asked is not None else "another worker called run.stop()"


class Step:
    """One step. Iterate over `micro_batches()` and call `backward` once for each; afterwards it is committed, and
    what follows may only read training state, except that objects given as `extra=` may be changed there, alike on
    all workers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.index = run._progress.version

    def micro_batches(self) -> Iterator[Any]:
        """The batches that fall to this worker, in the middle of which failures of other workers are recovered from:
        there may be more or fewer than last time, or none. Collective: the step is committed at the end."""
        run = self._run
        run._check_open()
        if run._progress.version != self.index:
            raise UserCodeError(f"step {self.index} is already committed; iterate over micro_batches() once per step")
        run._in_step = True
        try:
            run._progress = yield from commit_step(run._engine, run._progress)
        except Left as left:
            run._leave(left)
        finally:
            run._in_step = False
        run._engine.board.show(
            Phase.USER, run._progress.version, deadline_s=run._engine.config.elastic.exchange_timeout_s
        )

    def backward(self, loss: Tensor | Callable[[], Tensor], weight: float | None = None) -> None:
        """Backward of the mean loss of the current batch. `weight`: its number of target tokens relative to a full
        micro-batch, if it differs from its number of samples (padding, masks); default: samples / micro-batch.

        loss: or a function of no arguments that computes it. If memory runs out in there, the micro-batch is computed
        once more, with everything freed, and then by another worker: `micro_batches` gives the batch anew. With a
        tensor this covers the backward alone; an error of your own forward ends the worker."""
        engine = self._run._engine
        engine.watch.check_modes(engine.slots.where())
        engine.slots.backward(loss, weight)

    def check_committed(self) -> None:
        if self._run._progress.version == self.index:
            raise UserCodeError(
                f"step {self.index} was not finished: iterate over all of step.micro_batches(), without break"
            )

    @property
    def loss(self) -> float:
        """Mean loss of the committed step over the whole global batch, equal on all workers."""
        metrics = self._run._progress.metrics
        return metrics.loss if metrics else float("nan")

    @property
    def lr(self) -> float:
        """Learning rate of the committed step, of the first parameter group, equal on all workers."""
        metrics = self._run._progress.metrics
        return metrics.lr if metrics else float("nan")

    @property
    def samples(self) -> int:
        """How many samples the step is made of, on all workers together."""
        return self._run._engine.batches.schedule.at(self.index).count

    @property
    def validation(self) -> float | None:
        """Once the step is committed: the validation of the weights that it began with, those after `index` steps,
        equal on all workers; None if it was not due. Of the weights after the last step: `Run.validation`."""
        record = self._run._progress.record
        return record.validation if record is not None and record.step == self.index else None


def _begin_chaos(config: Config, link: Link) -> None:
    """Let this worker fail now and then, if the settings say so."""
    chaos = config.chaos
    if chaos.probability == 0:
        return
    if not isinstance(link, AgentLink):
        raise ConfigError(
            f"chaos.probability is {chaos.probability:g}, but nobody here starts a worker again that fails; use "
            "`elastic-harness launch`, or leave chaos.probability out"
        )
    failpoints.strike(chaos.probability, chaos.after_step, chaos.action)


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    config: Config | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    extra: Mapping[str, Stateful] | None = None,
    buffers: Sequence[str] = (),
    run_dir: str | Path | None = None,
    resume_from: str | Path | None = None,
    weights_only: bool = False,
    collate_fn: Any = None,
    before_step: Callable[[int], None] | None = None,
    policies: Sequence[UpdatePolicy] = (),
    validation: Validation | None = None,
) -> Run:
    """Join the run and return once this worker takes part in it, its state equal to everybody's.

    dataset: map-style (`len`, `[]`) or with `read(sample_ids)`; with an `order` (data/order.py), that is followed, else
    epochs shuffled by the seed. scheduler: stepped once per committed step. scaler:
    a `torch.amp.GradScaler`. ema: has `update_parameters(model)`, such as `torch.optim.swa_utils.AveragedModel`.
    extra: further objects with `state_dict`/`load_state_dict`, saved and handed to joiners; change them between two
    steps, by a rule that is the same on all workers. buffers: names of buffers
    that forward changes and whose mean over the slots is the new value (batch-norm statistics are found by
    themselves). run_dir: where events, ledger and checkpoints go when there is no launcher to say so. before_step:
    called with the number of each step before it, on every worker: sets `requires_grad` and modules' modes as a
    function of that number alone; with it, all parameters of the optimizer have a place in the gradient. policies:
    what becomes of each step's update, see `elastic_harness.policies`. validation: a mean over held-out batches every
    so many steps, which the workers share.
    resume_from: RUN[@VERSION], another run whose whole state (or, with weights_only, whose weights) a new run begins
    with; a run that did begin there is resumed as ever.

    Runs under `elastic-harness launch` (recovery in place), under torchrun (restart and resume) and under plain
    python (one worker). Collective; blocks until the coordinator has formed a generation with this worker in it, for
    a spare until it is needed. Raises ConfigError for what cannot be trained exactly.
    """
    config = config or Config()
    link, folder, board = _coordinator(run_dir)
    if unread := config.unread():
        raise ConfigError(" ".join(unread))
    if folder.resolve() in _open:
        _open[folder.resolve()].close()
    if torch.get_num_threads() != config.training.threads:
        torch.set_num_threads(config.training.threads)
    check_trainable(model, optimizer, scheduler)
    check_model(model)
    check_state_dict(model)
    if weights_only and resume_from is None:
        raise ConfigError("weights_only=True says what to take from another run; name that run: resume_from=")
    if validation is not None:
        if not isinstance(validation, Validation):
            raise ConfigError(f"validation= was given {validation!r}; give an elastic_harness.Validation(…)")
        validation.check()
    source = dataset if hasattr(dataset, "read") else MapStyle(dataset, collate_fn)
    training = config.training
    averaged = averaged_buffers(model, buffers)
    later = optimized(optimizer) if before_step is not None else ()
    layout = make_layout(model, averaged, later)
    order, data = data_of(source, config.seed)
    replay = replayed.read(folder)
    if replay is None:
        _begin_chaos(config, link)
    origin = origins.read(folder)
    if resume_from is not None:
        origin = origins.claim(folder, str(resume_from), weights_only=weights_only)
    first = origin.first(data) if origin is not None else (0, 0)
    if training.max_steps is not None and first[0] > training.max_steps:
        raise ConfigError(
            f"training.max_steps is {training.max_steps}, but the run begins from {origin}: give more steps than that"
        )
    tokens_per_sample = tokens_per_sample_of(dataset)
    schedule = scheduled(config, order.n_samples, tokens_per_sample, first)
    if replay is not None and config.slots_per_worker:
        recorded = [(step, slots * training.micro_batch_samples) for step, slots in replay.slots]
        schedule = replace(schedule, changes=tuple(recorded))
    batches = Batches(config, schedule, tokens_per_sample, pairs=layout.uniform, fixed=replay is not None)
    if origin is not None and batches.last_version <= first[0] and training.max_steps is None:
        raise ConfigError(
            f"the run begins from {origin}, at position {first[1]} in its data, where training.max_tokens or "
            "training.max_epochs is used up already: give more"
        )
    check_omissions(config, batches)
    health = config.health
    stretch = health.rollback_steps, health.omit_steps
    if health.on_spike != "off":
        thresholds = health.spike_sigmas, health.spike_norm_sigmas
        lowered = health.spike_lr_scale, health.spike_lr_steps
        policies = (SpikePolicy(health.on_spike, *thresholds, health.spike_window, *stretch, *lowered), *policies)
    deciding = Policies([SkipNonfinite(training.nonfinite_steps_max, health.on_nonfinite, *stretch), *policies])
    given: dict[str, Stateful | None] = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema}
    check_names({"policies": [policy.name for policy in policies], "extra": extra or {}}, given | {BATCHES: None})
    check_extra(extra or {}, config.elastic.exactness)
    own_states = deciding.states | ({BATCHES: batches} if batches.are_state else {})
    named = {k: v for k, v in given.items() if v is not None} | own_states | dict(extra or {})
    registry = Registry(model, named, averaged)
    registry.capture()  # refuses now what could not be saved later
    watch = StateWatch(
        model,
        optimizer,
        [e.name for e in layout.entries[: layout.parameters]],
        state_buffers(model, averaged),
        scheduler=scheduler,
        scaler=scaler,
        ema=ema,
        policies=deciding,
        batches=batches,
    )
    deadlines = Deadlines(config.elastic, board)

    def reading(step: int, slot: int, sample_ids: list[int]) -> None:
        board.show_samples(step, slot, sample_ids)
        deadlines.enter_phase(Phase.DATA, step, slot)

    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    connect, wire_device = _transport(config, device)
    if cuda and config.elastic.exactness == "strict":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, at the first matmul
        torch.use_deterministic_algorithms(True)
    engine = Engine(
        config=config,
        run_dir=folder,
        link=link,
        board=board,
        deadlines=deadlines,
        pace=OwnPace(config.health, str(data["dataset"].get("kind", type(source).__name__)), board, link.send),
        batches=batches,
        layout=layout,
        dataset=source,
        slots=SlotComputer(
            model,
            source,
            batches,
            order,
            layout,
            seed=config.seed,
            reading=reading,
            scaler=scaler,
            leaves_out=health.on_nonfinite == "skip_slot",
        ),
        applier=Applier(
            model,
            optimizer,
            layout,
            averaged,
            seed=config.seed,
            clip_norm=training.clip_norm,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            policies=deciding,
            batches=batches,
        ),
        policies=deciding,
        watch=watch,
        registry=registry,
        pool=Pool(layout.dtype, wire_device, pin=cuda and wire_device.type == "cpu"),
        saver=make_saver(
            config.checkpoint if replay is None else saving_nothing(config.checkpoint),
            folder,
            registry,
            lambda event, fields: link.send(CheckpointEvent(event, fields)),
            Inherited(origin, registry, own_states) if origin is not None else None,
        ),
        canary=config.elastic.canary and config.elastic.exactness == "strict",
        connect=connect,
        configured={
            "seed": config.seed,
            "n_samples": order.n_samples,
            "slots": config.slots,
            "lanes": config.lanes_resolved,
            "micro_batch_samples": training.micro_batch_samples,
            "global_batch_samples": training.global_batch_samples,
            "first_step": schedule.first_step,
            "first_position": schedule.first_position,
            **batches.described(),
            "parameters": sum(e.hi - e.lo for e in layout.entries),
            **data,
        },
        tokens_per_sample=tokens_per_sample or 1,
        omissions=omissions.parse(training.omit) + (replay.omissions if replay is not None else ()),
        before_step=before_step,
        replay=replay,
        measures=Measures.of(validation, config.checkpoint),
    )
    try:
        engine.applier.own()
        own = fingerprint(config, model, optimizer, data["dataset"], layout) | policy_settings(policies)
        if health.on_nonfinite != "skip_step":
            own["health.on_nonfinite"] = health.on_nonfinite
        if health.on_nonfinite == "rollback":
            own["health.rollback_steps"], own["health.omit_steps"] = stretch
        if training.omit:
            own["run.omit"] = omissions.listed(sorted(omissions.parse(training.omit)))
        if origin is not None:
            own["run.origin"] = origin.identity
        if replay is not None:
            check_program(replay, json.loads(json.dumps(own)))
        link.hello(own, batches.last_version, config.elastic.progress_timeout_max_s)
        progress = recover(engine, Progress(), None)
        if replay is not None:
            check_beginning(replay, progress.version)
    except Left as left:
        print(f"elastic-harness: {left.reason}", file=sys.stderr, flush=True)
        _leave(0)
    except BaseException:
        _release(engine)
        raise
    if progress.serving is not None:
        progress.serving.join()  # the caller's code before the first step is not checked before that begins
    _open[folder.resolve()] = run = Run(engine, progress)
    return run


_open: dict[Path, Run] = {}
"""The runs of this process that were not closed, by their folder."""


def _release(engine: Engine) -> None:
    """Let go of the run folder and of the user's objects."""
    engine.saver.close()
    engine.applier.disown()
    engine.link.close()


def _transport(config: Config, device: torch.device) -> tuple[Connect, torch.device]:
    """How members connect, and where what travels must lie: over TCP on the host (from a GPU through pinned memory),
    or over NCCL between GPUs."""
    if config.training.backend == "nccl":
        if device.type != "cuda":
            raise ConfigError(f"training.backend is nccl, which needs the model on a GPU; it is on {device}. Use tcp.")
        return partial(nccl.build, device=device), device
    return partial(tcp.build, hostname=os.environ.get(variables.HOST, "127.0.0.1")), torch.device("cpu")


def _coordinator(run_dir: str | Path | None) -> tuple[Link, Path, Board]:
    """The line to whoever decides: an agent's if there is one, else a stand-in for it."""
    descriptor = os.environ.pop(variables.LINK, None)
    if descriptor is None:
        program = Path(sys.argv[0]).stem or "run"
        _show_errors()
        link, folder = standalone.connect(run_dir, program)
        return link, folder, Board(None)
    if (names := late_settings()) and os.environ["LOCAL_RANK"] == "0":
        print(
            f"elastic-harness: this program sets {', '.join(names)}, but its worker is forked from a process that has "
            "imported torch before: set that where you call `elastic-harness launch`, or give it --no-fork-server",
            file=sys.stderr,
            flush=True,
        )
    processes.let_trace(int(descriptor))
    agent = AgentLink(int(descriptor), os.environ[variables.MEMBER])
    board = Board(int(os.environ.pop(variables.BOARD)))
    board.offer_stacks()
    _report_errors(agent, board)
    return agent, Path(os.environ[variables.RUN_DIR]), board


def _report_errors(link: AgentLink, board: Board) -> None:
    """An uncaught exception is told to the agent, with the slot it happened in, and ends the process at once: a normal
    interpreter exit would take most of a second. Of a wrong configuration, a failing machine or training that diverged
    only the message is shown, and the exit code says which."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        expected = isinstance(error, HarnessError) and error.exit_code in (EXIT_CONFIG, EXIT_INFRASTRUCTURE)
        if expected or isinstance(error, Diverged):
            print(f"error: {error}", file=sys.stderr)
            _leave(error.exit_code)  # type: ignore[attr-defined]
        text = "".join(traceback.format_exception(kind, error, trace))
        print(text, file=sys.stderr, flush=True)
        summary = "".join(traceback.format_exception_only(kind, error)).strip()
        if isinstance(error, OutOfMemory):
            link.send(SlotError(error.step, error.slot, error.cause, text, error.samples, out_of_memory=True))
            _leave(error.exit_code)
        in_slot = board.phase in (Phase.SLOT, Phase.DATA) and board.slot >= 0
        if in_slot:
            samples, hungry = tuple(board.sample_ids), is_out_of_memory(error)
            link.send(SlotError(board.step, board.slot, summary, text, samples, hungry))
        else:
            link.send(ScriptError(summary, text))
        _leave(error.exit_code if isinstance(error, HarnessError) else EXIT_USER_CODE)

    sys.excepthook = hook


def _show_errors() -> None:
    """Without an agent: an uncaught error of ours is one message and its own exit code; all others are as ever."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, HarnessError):
            before(kind, error, trace)
            return
        print(f"error: {error}", file=sys.stderr)
        if hasattr(sys, "ps1"):  # somebody sits there, and goes on
            return
        _leave(error.exit_code)

    sys.excepthook = hook


def _leave(code: int) -> NoReturn:
    """End the process now, with what was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
