"""What a run's page and its terminal show, as JSON values, in parts: each part is sent again only when it changes."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePath
from typing import Any

from elastic_harness.dashboard.follow import Followed
from elastic_harness.dashboard.live_run import LiveRun
from elastic_harness.dashboard.series import Point
from elastic_harness.memory_pools import read_pools, resident_bytes
from elastic_harness.report import figures
from elastic_harness.report.words import of_failure, state, what_next
from elastic_harness.runs.episodes import Episode, Failure, Tale, every
from elastic_harness.runs.ledger import LedgerLine
from elastic_harness.runs.story import WorkerStory

MARKS_MAX = 2000  # failures on the curves
EPISODES_MAX = 200  # the newest, that are shown
WORKERS_MAX = 600
RECOVERIES_MAX = 100
ALARMS_MAX = 20
COLUMNS = ("first", "last", "t", "loss", "low", "high", "lr", "grad_norm", "tokens_per_s", "workers")


@dataclass(frozen=True)
class RunShown:
    """A run at one moment."""

    now: dict[str, Any]  # what changes with each step
    crew: dict[str, Any]  # workers and generations
    failures: dict[str, Any]  # what went wrong, and what it cost
    state: tuple[object, ...]  # on which the last two depend

    @property
    def parts(self) -> Mapping[str, Any]:
        return {"now": self.now, "crew": self.crew, "failures": self.failures}


def show(followed: Followed, at: float, before: RunShown | None = None) -> RunShown:
    """Return what is to be shown now. It reads run.json, the end of the ledger, and /proc of workers here. What has not
    changed since `before` is taken from there."""
    run, tale, live = followed.run, followed.run.told(), followed.live
    newest = tale.episodes[-1] if tale.episodes else None
    state = (id(run), run.happened, live, run.crew.waiting, newest and newest.over_at, newest and newest.redone_steps)
    now = _now(followed, tale, at, live=live)
    if before is not None and before.state == state:
        return replace(before, now=now)
    return RunShown(now, _crew(run, live=live), _failures(followed, tale), state)


# ---- with each step


def _now(followed: Followed, tale: Tale, at: float, *, live: bool) -> dict[str, Any]:
    run, record = followed.run, followed.record()
    newest = run.series.points[-1] if run.series.points else None
    parts = figures.account(tale)
    costs = figures.held_up(tale)
    options = record.get("options") or {}
    return {
        "name": followed.name,
        "run": record.get("run_id") or tale.run_id or followed.name,
        "folders": [str(path) for path in followed.paths],
        "at": at,
        "state": _state(record, tale, live=live),
        "live": live,
        "exit_code": record.get("exit_code"),
        "message": str((tale.finished or {}).get("message") or ""),
        "waiting": (run.crew.waiting or "") if live else "",
        "started": tale.started_at,
        "newest": tale.newest_at,
        "launches": tale.launches,
        "step": run.committed[1] if run.committed[1] >= 0 else None,
        "steps_wanted": followed.steps_wanted(),
        "committed_at": newest.t if newest else None,
        "lineage": run.crew.lineage,
        "generation": run.crew.generation,
        "loss": newest.loss if newest else None,
        "lr": newest.lr if newest else None,
        "grad_norm": newest.grad_norm if newest else None,
        "step_s": tale.healthy_s,
        "tokens_per_s": run.tokens_per_s,
        "best_tokens_per_s": run.best_tokens_per_s,
        "time": {**vars(parts), "effective": parts.effective},
        "lost": {"failures": len(tale.failures), "held_up": len(costs), "seconds": sum(costs),
                 "redone_steps": sum(episode.redone_steps for episode in tale.episodes)},
        "computed": _computed(followed.newest_step(), run),
        "checkpoints": [{"tier": tier, **vars(saved)} for tier, saved in run.saved.items()],
        "not_saved": run.not_saved,
        "memory": _memory(run, at) if live else {"pools": [], "workers": []},
        "alarms": [_alarm(event) for event in list(run.alarms)[-ALARMS_MAX:]],
        "damaged": run.damaged,
        "workers_wanted": options.get("workers"),
        "next": what_next(followed.name, tale, live=live),
    }  # fmt: skip


def _state(record: Mapping[str, Any], tale: Tale, *, live: bool) -> str:
    """Return what a run does, in a word: as run.json says, while it lives."""
    return str(record.get("status") or "running") if live else state(tale, live=False)


def _computed(line: LedgerLine | None, run: LiveRun) -> dict[str, Any] | None:
    """Return who computed which slots of the newest step, and how far the data is."""
    if line is None:
        return None
    by_slot = [", ".join(line.members_of(slot)) for slot in range(line.slots)]
    rows, at = [], 0
    for member, slots in groupby(by_slot):
        count = sum(1 for _ in slots)
        rows.append({"member": member, "first": at, "end": at + count})
        at += count
    samples = run.crew.configured.get("n_samples")
    return {
        "step": line.step,
        "slots": line.slots,
        "by": rows,
        "epoch": line.epoch,
        "position": line.position + line.count,
        "samples": samples if isinstance(samples, int) and samples > 0 else None,
    }


def _memory(run: LiveRun, at: float) -> dict[str, Any]:
    """Return the memory of the workers on this machine, and how full it is."""
    host = socket.gethostname()
    living = [w for w in run.crew.workers.values() if w.end is None and w.host == host]
    held = [{"member": worker.member, "bytes": resident_bytes(worker.pid)} for worker in living]
    pools = read_pools(at) if living else []
    return {
        "workers": [each for each in held if each["bytes"]],
        "pools": [{"pool": each.pool, "used": each.used_bytes, "limit": each.limit_bytes} for each in pools],
    }


def _alarm(event: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: event.get(name) for name in ("t", "kind", "severity", "message", "member")}
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in told.items()}


# ---- with each change of the workers


def _crew(run: LiveRun, *, live: bool) -> dict[str, Any]:
    crew = run.crew
    living = [w for w in crew.workers.values() if w.end is None]
    ended = [w for w in crew.workers.values() if w.end is not None]
    shown = sorted([*ended[-WORKERS_MAX:], *living], key=lambda w: w.started)
    recoveries = sorted(crew.recoveries.values(), key=lambda r: r.t)[-RECOVERIES_MAX:]
    return {
        "members": list(crew.members),
        "workers": [_worker(w, run, live=live) for w in shown],
        "changes": [vars(change) for change in run.changes],
        "waits": list(run.waits),
        "recoveries": [{**vars(r), "stages": dict(r.stages)} for r in recoveries],
        "validation": list(run.validation),
    }


def _worker(worker: WorkerStory, run: LiveRun, *, live: bool) -> dict[str, Any]:
    return {**vars(worker), "place": worker.member.rpartition("-")[0], "state": state_of(worker, run, live=live)}


def state_of(worker: WorkerStory, run: LiveRun, *, live: bool) -> str:
    """Return what a worker does: starting, waiting, training or dead; left, if it was let go, or if the log ended."""
    if worker.end is not None or not live:
        return "left" if worker.end in ("stopped", None) else "dead"
    if worker.member in run.crew.members:
        return "waiting" if run.crew.waiting else "training"
    return "waiting" if worker.spare else "starting"


# ---- with each failure


def _failures(followed: Followed, tale: Tale) -> dict[str, Any]:
    interrupted = [episode for episode in tale.episodes if episode.interrupted][-MARKS_MAX:]
    shown = list(enumerate(tale.episodes))[-EPISODES_MAX:]
    return {
        "total": len(tale.episodes),
        "marks": [[round(e.began_at, 3), e.over_step if e.over_step is not None else e.first.step]
                  for e in interrupted],
        "episodes": [_episode(followed, number, episode) for number, episode in reversed(shown)],
    }  # fmt: skip


def _episode(followed: Followed, number: int, episode: Episode) -> dict[str, Any]:
    over_at = math.inf if episode.over_at is None else episode.over_at
    stages = followed.run.crew.stages_after(episode.began_at, over_at) if episode.interrupted else {}
    told = {name: value for name, value in vars(episode).items() if name != "failures"}
    return {
        **told,
        "number": number,
        "t": episode.began_at,
        "stages": stages,
        "failures": [{**of_failure(each, followed.name), "texts": _texts(followed, each)} for each in episode.failures],
    }


def _texts(followed: Followed, failure: Failure) -> list[str]:
    """Return the names of the logs and stacks that belong to a failure."""
    found: dict[str, None] = {}
    for each in every([failure]):
        name = PurePath(each.log).name
        if name.endswith(".log"):
            found[f"logs/{name}"] = None
        if each.member in followed.run.stacks:
            found[f"hangs/{PurePath(followed.run.stacks[each.member]).name}"] = None
    return list(found)


# ---- the curve


def rows(points: Iterable[Point]) -> list[list[float | int | None]]:
    """Return points as rows of COLUMNS, with as many digits as a screen can show."""
    return [
        [p.first, p.last, round(p.t, 3), _short(p.loss), _short(p.loss_low), _short(p.loss_high), _short(p.lr),
         _short(p.grad_norm), _short(p.tokens_per_s), p.workers]
        for p in points
    ]  # fmt: skip


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
