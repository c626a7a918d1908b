"""The kinds of faults: one table, from which plans are drawn, faults are carried out, runs are judged, and the table in
docs/chaos.md is made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Loss = Literal["worker", "several", "job", "nobody"]
"""Who ends because of a fault: the worker that it happens to, several or all workers, the whole job (which is launched
again), or nobody."""


@dataclass(frozen=True)
class Rule:
    """What a process of the job does to itself: an action of failpoints.py at one of its places."""

    action: str
    place: str = ""  # empty: where the fault is aimed
    conditions: str = ""  # further ones
    who: str = "w{worker}-*"  # the pattern of members


@dataclass(frozen=True)
class Kind:
    """One kind of fault. It is carried out by `rules`, or from outside by the act of this name (inject.py)."""

    name: str
    what: str  # it does
    codes: tuple[str, ...]  # with one of which it must be noticed; none: it is no failure
    rules: tuple[Rule, ...] = ()
    act: str = ""
    places: tuple[str, ...] = ()  # at which it may be aimed; the first one is the default
    loses: Loss = "worker"
    culprit: Literal["worker", "job"] = "worker"  # whom the codes must be about
    also: tuple[str, ...] = ()  # codes that may be told because of it, besides
    breaks: tuple[str, ...] = ()  # checks that it may break (verdict.py)
    needs: tuple[str, ...] = ()  # of NEEDS
    workers_min: int = 2

    @property
    def evicts(self) -> bool:
        """Whether it makes a worker compute other bits, for which its place stays empty."""
        return OTHER_BITS in self.codes

    @property
    def comes_last(self) -> bool:
        """Whether it happens after the last step only."""
        return any(rule.place.startswith("finish.") for rule in self.rules)

    @property
    def is_aimed(self) -> bool:
        """Whether it can be aimed at one worker or slot."""
        return bool(self.rules) and self.rules[0].who == Rule.who


NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "spare": "a spare (--spares)",
        "store": "an etcd (--store)",
    }
)

COMPUTING = ("slot.forward", "slot.backward", "lane.finished")
EXCHANGING = ("exchange.posted", "exchange.header_sent", "exchange.headers_received", "exchange.finished")
APPLYING = ("apply.gradients", "apply.optimizer", "apply.finished")
IN_A_STEP = (*COMPUTING, *EXCHANGING, *APPLYING)
HANGING = ("EH-H101", "EH-H103", "EH-H104")
OTHER_BITS = "EH-C101"
WRITER = "writer-*"


def _at(action: str, conditions: str = "", *, at: str = "") -> tuple[Rule, ...]:
    return (Rule(action, at, conditions),)


KINDS = (
    # ---- workers end
    Kind("kill", "SIGKILL to a worker", ("EH-W101",), _at("kill"), places=IN_A_STEP),
    Kind("terminate", "SIGTERM to a worker, past its agent", ("EH-W102",), _at("terminate"), places=COMPUTING),
    Kind("abort", "a library of a worker calls abort()", ("EH-W104",), _at("abort"), places=IN_A_STEP),
    Kind("crash", "SIGSEGV in a worker", ("EH-W103",), _at("crash"), places=IN_A_STEP),
    Kind("exit", "a worker ends with exit code 7, without a word", ("EH-U104",), _at("exit:7"), places=COMPUTING),
    Kind("wrapper", "a worker ends as a shell whose child was killed", ("EH-W107",), _at("exit:137"), places=COMPUTING),
    Kind("exception", "an exception in the user's code", ("EH-U102",), _at("raise"), places=COMPUTING[:1]),
    Kind("interrupt", "SIGINT to a worker, past its agent", ("EH-U102", "EH-W102"), _at("interrupt"),
         places=COMPUTING),
    Kind("kill-two", "SIGKILL to two workers at one moment", ("EH-W101",), act="kill_two", loses="several",
         workers_min=3),
    Kind("kill-all", "SIGKILL to all workers at one moment", ("EH-W101",), act="kill_all", loses="several",
         breaks=("lanes",)),
    Kind("kill-spare", "SIGKILL to a warm spare", ("EH-W101",), act="kill_spare", needs=("spare",)),
    Kind("kill-joiner", "a worker dies, and its successor while it receives the state", ("EH-W101",),
         (Rule("kill"), Rule("kill", "recovery.receiving", who="w*")), places=COMPUTING, loses="several"),
    Kind("kill-donor", "a worker dies, and so does the one that hands the state to its successor", ("EH-W101",),
         (Rule("kill"), Rule("kill", "recovery.serving", who="w*")), places=COMPUTING, loses="several", workers_min=3),
    Kind("kill-in-recovery", "a worker dies, and another one while the others recover", ("EH-W101",),
         (Rule("kill"), Rule("kill", "recovery.rebuilt", who="w*")), places=IN_A_STEP, loses="several", workers_min=3),
    # ---- workers stand still
    Kind("stop", "SIGSTOP to a worker", ("EH-H102",), _at("stop"), places=(*COMPUTING, *EXCHANGING[:1])),
    Kind("loop", "an endless loop in Python", HANGING, _at("loop"), places=COMPUTING[:2]),
    Kind("lock", "native code that keeps the interpreter's lock", HANGING, _at("lock"), places=COMPUTING[:2]),
    Kind("read", "a read that blocks for ever", HANGING, _at("read"), places=COMPUTING[:2]),
    Kind("pause", "a worker pauses for 0.7 s, which is no failure", (), _at("pause:0.7"), places=IN_A_STEP,
         loses="nobody"),
    Kind("slow", "slots of a worker take 50 ms of processor time more, for 30 slots", (),
         _at("spin:0.05", "times=30"), places=("slot.forward",), loses="nobody"),
    # ---- memory
    Kind("exhaust", "memory runs out in a slot", ("EH-M104",), _at("exhaust"), places=("slot.forward",),
         loses="nobody"),
    Kind("exhaust-twice", "memory runs out in a slot, and again in the second try", ("EH-M104", "EH-M105"),
         _at("exhaust", "times=2"), places=("slot.forward",), loses="nobody", also=("EH-L105",)),
    # ---- other bits
    Kind("nan-gradient", "one worker's gradients become NaN", (OTHER_BITS,), _at("nan", at="lane.computed"),
         workers_min=3),
    Kind("flip-gradient", "a worker's gradients have a flipped bit from some step on", (OTHER_BITS,),
         _at("flip", "times=100000", at="lane.computed"), workers_min=3, also=("EH-C102",), breaks=("lanes",)),
    Kind("flip-sum", "a worker adds up with a flipped bit in each block from some step on", (OTHER_BITS,),
         _at("flip", "times=100000", at="exchange.added_up"), workers_min=3, also=("EH-C102",), breaks=("lanes",)),
    Kind("flip-update", "a bit of a weight is flipped while a worker applies an update", (OTHER_BITS,),
         _at("flip", at="apply.optimizer"), workers_min=3, also=("EH-C102",), breaks=("lanes",)),
    Kind("flip-memory", "a bit of a weight is flipped in a worker's memory", (OTHER_BITS,),
         _at("flip", at="step.begun"), workers_min=3, also=("EH-C102",), breaks=("lanes",)),
    Kind("close-link", "a worker closes its connection to the agent", ("EH-H107", "EH-U105"), _at("hang-up"),
         places=("slot.forward",)),
    Kind("flip-wire", "a bit of a message is flipped on its way", ("EH-L101",), _at("flip", at="transport.received"),
         loses="nobody", culprit="job"),
    # ---- checkpoints
    Kind("kill-writer", "the checkpoint writer is killed while it writes", ("EH-S107",),
         (Rule("kill", "checkpoint.sealed", who=WRITER),), loses="nobody", culprit="job"),
    Kind("stop-writer", "the checkpoint writer stands still for 2 s while it writes", (),
         (Rule("pause:2", "checkpoint.sealed", who=WRITER),), loses="nobody", culprit="job"),
    Kind("full-writer", "the checkpoint writer may write no byte for a while, as on a full disk", ("EH-S101",),
         act="fill_writer", loses="nobody", culprit="job"),
    Kind("slow-disk", "each piece that the checkpoint writer writes takes 0.3 s", (),
         (Rule("pause:0.3", "checkpoint.writing", "times=10", who=WRITER),), loses="nobody", culprit="job"),
    Kind("kill-at-the-end", "a worker is killed when it has saved the final weights", ("EH-W101",),
         (Rule("kill", "finish.saved", who="w*"),)),
    Kind("kill-in-audit", "a worker is killed while sums are audited", ("EH-W101",),
         (Rule("kill", "audit.blocks_sent", who="w*"),)),
    Kind("kill-while-saving", "a worker is killed while it copies the state for a checkpoint", ("EH-W101",),
         (Rule("kill", "checkpoint.begun", who="w*"),)),
    # ---- the harness itself
    Kind("kill-agent", "SIGKILL to the agent, with all its workers", ("EH-W111",), act="kill_agent", loses="several",
         culprit="job", breaks=("lanes",)),
    Kind("kill-fork-server", "SIGKILL to the process from which workers are forked", (), act="kill_fork_server",
         loses="nobody", culprit="job"),
    Kind("store-away", "the etcd of the job ends, and is there again after some seconds", ("EH-L103",),
         act="store_away", loses="nobody", culprit="job", needs=("store",)),
    Kind("store-stopped", "the etcd of the job does not answer for some seconds (SIGSTOP)", ("EH-L103", "EH-T105"),
         act="stop_store", loses="nobody", culprit="job", needs=("store",)),
    Kind("store-wiped", "the etcd of the job loses all its data", (), act="wipe_store", loses="nobody",
         culprit="job", needs=("store",), also=("EH-L103",)),
    Kind("kill-without-store", "a worker is killed while the etcd of the job is away for some seconds",
         ("EH-W101",), act="kill_without_store", needs=("store",), also=("EH-L103",)),
    # ---- the job ends, and is launched again
    Kind("terminate-job", "SIGTERM to the launcher: the job is drained, and launched again", ("EH-P102",),
         act="terminate_job", loses="job", culprit="job", also=("EH-P105", "EH-P104")),
    Kind("interrupt-job", "Ctrl-C: the job stops, and is launched again", ("EH-P105",), act="interrupt_job",
         loses="job", culprit="job"),
    Kind("notice", "a file says that the machine will go; the job is launched again", ("EH-P103",), act="notice",
         loses="job", culprit="job", also=("EH-P105",)),
    Kind("kill-job", "SIGKILL to launcher and agent; the job is launched again", ("EH-W111",), act="kill_job",
         loses="job", culprit="job", breaks=("lanes",)),
    Kind("flip-checkpoint", "a bit of the newest checkpoint is flipped; the job is killed and launched again",
         ("EH-S103",), act="flip_checkpoint", loses="job", culprit="job", also=("EH-W111",),
         breaks=("lanes",)),
    Kind("tear-checkpoint", "the newest checkpoint loses a file; the job is killed and launched again",
         ("EH-S104", "EH-S103"), act="tear_checkpoint", loses="job", culprit="job",
         also=("EH-W111",), breaks=("lanes",)),
    Kind("damage-ledger", "a line of the ledger is damaged; the job is killed and launched again", ("EH-S111",),
         act="damage_ledger", loses="job", culprit="job", also=("EH-W111",),
         breaks=("lanes", "ledger", "events")),
)  # fmt: skip
TABLE: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in KINDS})
"""All kinds by their names."""
