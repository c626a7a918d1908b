"""The messages between agent and worker. docs/protocol.md lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_harness.contract.checkpoint_event import CheckpointEvent
from elastic_harness.contract.codec import Codec
from elastic_harness.contract.wire import as_fields
from elastic_harness.membership.types import Digest, Generation, Report
from elastic_harness.omissions import Entry
from elastic_harness.shape import UNTOLD

PROTOCOL = 7


# ---- worker → agent


@dataclass(frozen=True)
class Hello:
    """The worker has reached `start()`. The first one turns the job into an elastic run."""

    protocol: Any
    fingerprint: dict[str, Any] | None = None
    max_steps: int | None = None
    deadline_max_s: float | None = None


@dataclass(frozen=True)
class LinkTrouble:
    """An exchange broke and nobody has announced why. `ways`: the addresses behind which peers cannot be reached."""

    generation: int
    version: int
    peers: tuple[str, ...]
    ways: dict[str, str]
    error: str = ""


@dataclass(frozen=True)
class SetValue:
    """A value for the other members of the generation, in base64. Through these values members find each other."""

    generation: int
    key: str
    value: str


@dataclass(frozen=True)
class GetValue:
    """The worker waits for a value. The agent sends it as soon as it is there."""

    generation: int
    key: str


@dataclass(frozen=True)
class PolicyDecision:
    """An update policy changed or refused a step's update, or had something to say about it."""

    policy: str
    verdict: Literal["warn", "scale", "skip", "halt", "rollback"]
    reason: str
    scale: float  # the factor of the gradient; 0: nothing was applied
    evidence: dict[str, Any] = field(default_factory=dict)
    lr_scale: float = field(default=1.0, metadata=UNTOLD)  # the factor of the learning rates in this step

    def in_words(self, step: int) -> str:
        """Return the decision as one line."""
        done = {"warn": "applied", "scale": f"scaled by {self.scale:g}"}.get(self.verdict, "skipped")
        if self.lr_scale != 1.0:
            done = f"{'applied' if self.scale == 1.0 else done} with {self.lr_scale:g} times the learning rate"
        return f"the update of step {step} was {done}: {self.reason}"


def decided(decisions: Sequence[PolicyDecision]) -> dict[str, Any]:
    """Return the fields about decisions for the event and the ledger; none without decisions. `skipped`: why nothing
    was applied."""
    skipped = [each.reason for each in decisions if each.verdict in ("skip", "halt")]
    fields = {"decisions": [as_fields(each) for each in decisions], "skipped": "; ".join(skipped)}
    return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True)
class Commit:
    """A step was committed. The first member of each node sends it. A member that becomes the first repeats the last
    one."""

    lineage: int
    step: int
    generation: int
    world_size: int
    loss: float | None = None
    tokens: int | None = None
    lr: float | None = None
    grad_norm: float | None = None
    step_s: float | None = None
    decisions: tuple[PolicyDecision, ...] = ()
    bad_samples: dict[str, list[int]] = field(default_factory=dict)  # by slot, if its loss is not finite
    ledger: dict[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The fields of the event `step_committed`."""
        left_out = ("decisions", "ledger", *(() if self.bad_samples else ("bad_samples",)))
        told = {name: value for name, value in as_fields(self).items() if name not in left_out}
        samples = {"samples": self.ledger["count"]} if self.ledger and "count" in self.ledger else {}
        return told | samples | decided(self.decisions)


@dataclass(frozen=True)
class HandOver:
    """One side of a hand-over of the whole state, for the ledger. Giver and taker both send it."""

    ledger: dict[str, Any]


@dataclass(frozen=True)
class LogEvent:
    """A line for events.jsonl."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class SlotError:
    """User code raised while it computed a slot. The process ends."""

    step: int
    slot: int
    error: str
    traceback: str | None = None
    samples: tuple[int, ...] = ()
    out_of_memory: bool = field(default=False, metadata=UNTOLD)


@dataclass(frozen=True)
class SlotDeclined:
    """The worker has not the memory for a slot. It waits for a generation in which another one computes it."""

    generation: int
    step: int
    slot: int
    error: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class ScriptError:
    """User code raised elsewhere. The process ends."""

    error: str
    traceback: str | None = None


@dataclass(frozen=True)
class UnfitPeer:
    """The gate refused a peer's canary or state, or with `samples` the samples that the peer has read."""

    member: str
    reason: str
    samples: bool


@dataclass(frozen=True)
class Rechecked:
    """Members have computed a part of a step again."""

    step: int
    what: str  # lanes, or elements of the sum
    workers: int
    outcome: str  # same, ill, undecided or random
    ill: tuple[str, ...] = ()  # members that gave other bits than the majority

    def in_words(self) -> str:
        if self.outcome == "same":
            found = "all gave the same bits, so it is the data or the model"
        elif self.outcome == "ill":
            found = f"{', '.join(self.ill)} gave other bits than the majority"
        else:
            found = "no majority gave the same bits"
        return f"{self.what} of step {self.step} were computed again on {self.workers} workers: {found}"


@dataclass(frozen=True)
class DoubtfulState:
    """What the run has done since a version may hold wrong bits, or a policy wants to go back. The run goes on from a
    checkpoint of that version or before. Every member that knows says so."""

    lineage: int
    version: int
    reason: str
    unfit: tuple[str, ...] = ()  # members of which is known that they compute wrong
    omissions: tuple[Entry, ...] = ()  # of a policy: what the run omits from then on


@dataclass(frozen=True)
class SlowWorker:
    """The worker has been slower than the others for long, by its own comparison. It says so once."""

    step: int
    times: float  # its slots take so many times as long as those of the others
    others: int  # with so many it was compared
    steps: int  # in a row
    cause: str  # data, cpu, quota, steal, swapping, disk, clock or unknown
    reason: str
    evidence: dict[str, Any]
    replace: bool = False  # a spare is to take its place

    def in_words(self, member: str) -> str:
        others = "the other worker" if self.others == 1 else f"the median of the {self.others} others"
        return f"worker {member} takes {self.times:.1f} times as long for a slot as {others}: {self.reason}"


@dataclass(frozen=True)
class FastAgain:
    """A worker that was slow is about as fast as the others again."""

    step: int
    times: float


@dataclass(frozen=True)
class Alarm:
    """Something may become a failure, or costs time. It is told, and nothing is done about it."""

    kind: str
    severity: Literal["warning", "critical"]
    message: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Undecided:
    """Members have computed other bits for the same lanes, and nobody can say who is right. The job ends with exit code
    4."""

    reason: str


@dataclass(frozen=True)
class LeftOut:
    """The worker is not in that generation. It has reached the boundary before the generation, and ends."""

    generation: int


@dataclass(frozen=True)
class PolicyHalt:
    """An update policy ends the run after a step. The job ends with exit code 1."""

    reason: str


@dataclass(frozen=True)
class LoopLeft:
    """The script left the loop over `run.steps()`. The job ends with exit code 1."""

    reason: str


@dataclass(frozen=True)
class MeasuresDiffer:
    """Workers have reported two values of one metric, or measure different things. The job ends with exit code 1."""

    reason: str


@dataclass(frozen=True)
class EndAsked:
    """A script has called `run.stop`: the run has to end after that step. The agent passes the request on, also to
    workers that come later."""

    step: int
    reason: str

    def or_earlier(self, other: EndAsked | None) -> EndAsked:
        """Return the one that ends the run first."""
        return other if other is not None and other.step <= self.step else self


@dataclass(frozen=True)
class WeightsNotSaved:
    """The trained weights could not be written. The job ends with exit code 4."""

    error: str


@dataclass(frozen=True)
class Imported:
    """The modules that the worker has imported by its first commit, if the agent wants to know them."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class LastStepDone:
    """The worker has committed the last step, or holds it after a recovery."""

    version: int
    weights_sha256: str | None = None
    final_loss: float | None = None
    stop_reason: str | None = None  # of the script that ended the run


TO_AGENT = Codec(
    {
        "hello": Hello,
        "report": Report,
        "trouble": LinkTrouble,
        "kv_set": SetValue,
        "kv_get": GetValue,
        "commit": Commit,
        "state": HandOver,
        "event": LogEvent,
        "checkpoint": CheckpointEvent,
        "slot_error": SlotError,
        "declined": SlotDeclined,
        "error": ScriptError,
        "unfit": UnfitPeer,
        "recheck": Rechecked,
        "slow": SlowWorker,
        "fast_again": FastAgain,
        "alarm": Alarm,
        "undecided": Undecided,
        "doubt": DoubtfulState,
        "leaving": LeftOut,
        "policy_halt": PolicyHalt,
        "left_loop": LoopLeft,
        "measures_differ": MeasuresDiffer,
        "stop_asked": EndAsked,
        "unsaved": WeightsNotSaved,
        "imports": Imported,
        "finished": LastStepDone,
    }
)

# ---- agent → worker


@dataclass(frozen=True)
class Paused:
    """No generation can go on: abort what is running, and wait with the state alive."""

    reason: str


@dataclass(frozen=True)
class Value:
    """The value that the worker waits for."""

    generation: int
    key: str
    value: str


@dataclass(frozen=True)
class Leave:
    """Leave after the step at which all members know of it."""

    reason: str = "asked to stop"
    checkpoint: bool = False


@dataclass(frozen=True)
class AuditAsked:
    """Compare all members in the next step. number: of the request."""

    number: int


@dataclass(frozen=True)
class AllDone:
    """All members have finished."""

    version: int


@dataclass(frozen=True)
class Refusal:
    """The worker does not fit the run. It prints why, and exits with 2."""

    reason: str


TO_WORKER = Codec(
    {
        "generation": Generation,
        "pause": Paused,
        "digest": Digest,
        "kv": Value,
        "stop": Leave,
        "stop_asked": EndAsked,
        "audit": AuditAsked,
        "done": AllDone,
        "refuse": Refusal,
    }
)
