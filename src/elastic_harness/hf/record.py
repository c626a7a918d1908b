"""What a Trainer remembers from step to step, as a part of the training state: checkpoints hold it, and a worker that
joins receives it, so whoever is rank 0 logs, compares and stops as rank 0 before it would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from elastic_harness.policies import Apply, State, StepFacts

_MEASURED = ("_runtime", "_per_second", "_time", "_delta", "_before", "_peaked")
"""How names in the log end whose values depend on the machine."""


class TrainerRecord:
    """The Trainer's history, the best metric, the states of its callbacks, and the losses that are not logged yet.

    Its state is that of the last step after which all was done: logged, evaluated, saved. If an exception ends that
    half-way, and the run goes on later, it is done again from there. `pending`: the loss of that step, else None.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._history: list[dict[str, Any]] = []  # all that was logged, without what depends on the machine
        self.loss_sum = 0.0  # of the steps since the last log
        self.loss_logged = 0.0  # sum over all steps before
        self.logged_at = 0  # the step of the last log
        self.pending: float | None = None
        self._done = self._now()

    def note_loss(self, loss: float) -> None:
        """A step is committed, and nothing has been done after it yet."""
        self.pending = loss
        self.loss_sum += loss

    def take_mean(self, step: int) -> float:
        """Return the mean loss since the last log; this is a log."""
        mean = self.loss_sum / (step - self.logged_at)
        self.loss_logged += self.loss_sum
        self.loss_sum, self.logged_at = 0.0, step
        return mean

    def note_done(self) -> None:
        """All is done after a step."""
        self.pending = None
        self._done = self._now()

    def _now(self) -> dict[str, Any]:
        state = self._trainer.state
        for logs in state.log_history[len(self._history) :]:
            self._history.append({name: value for name, value in logs.items() if not name.endswith(_MEASURED)})
        return {
            "losses": [self.loss_sum, self.loss_logged, self.logged_at],
            "step": state.global_step,
            "epoch": state.epoch,
            "logged": len(self._history),
            "best_metric": None if state.best_metric is None else float(state.best_metric),
            "best_global_step": state.best_global_step,
            "best_model_checkpoint": state.best_model_checkpoint,
            "callbacks": [dict(callback.state()["attributes"]) for callback in self._callbacks()],
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self._done, "pending": self.pending, "log_history": self._history[: self._done["logged"]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done = {name: value for name, value in state.items() if name not in ("pending", "log_history")}
        self._history = [dict(logs) for logs in state["log_history"]]
        self.loss_sum, self.loss_logged, self.logged_at = state["losses"]
        self.pending = state["pending"]
        self.loss_sum += self.pending or 0.0
        own = self._trainer.state
        own.global_step, own.epoch = state["step"], state["epoch"]
        own.log_history = [dict(logs) for logs in self._history]
        own.best_metric, own.best_global_step = state["best_metric"], state["best_global_step"]
        own.best_model_checkpoint = state["best_model_checkpoint"]
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            vars(callback).update(attributes)

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]


@dataclass(frozen=True)
class Watcher:
    """A policy that changes nothing: it knows the facts of the newest step."""

    name: ClassVar[str] = "hf_watcher"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seen", [])

    def begin(self) -> State:
        return {}

    def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Apply]:
        self._seen[:] = [facts]  # type: ignore[attr-defined]
        return state, Apply()

    @property
    def facts(self) -> StepFacts | None:
        """Of the newest step; None if this worker has not seen one, or its update is omitted."""
        return next(iter(self._seen), None)  # type: ignore[attr-defined]


def begin_as_rank_0(callbacks: list[TrainerCallback], args: Any, state: Any, control: Any, **objects: Any) -> None:
    """Have the callbacks of transformers open what rank 0 has open: a progress bar, the run of a tracker. Those of the
    user are told nothing: theirs may have begun already."""
    for callback in callbacks:
        if type(callback).__module__.partition(".")[0] == "transformers":
            if getattr(callback, "_initialized", False):
                callback._initialized = False  # type: ignore[attr-defined]  # a tracker that has seen it is not rank 0
            callback.on_train_begin(args, state, control, **objects)
