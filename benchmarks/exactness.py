"""Are the final weights the same bits, whatever happens to the workers? And what does change them?

    python -m benchmarks.exactness                     everything (about a quarter of an hour)
    python -m benchmarks.exactness --quick             a few runs of each kind

Every run is the public command line; its hash is the `run_finished` event's, its ledger is checked by
`elastic-harness verify`. The reference is one worker that nothing happens to.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import HERE, BenchmarkError, elastic_harness_argv, environment, finish, say, tail
from benchmarks.systems import Ours
from benchmarks.turns import ddp_environments

CONFIG = HERE / "exactness.yaml"
RUN_TIMEOUT_S = 240.0


def run_to_end(system: Ours, act: Callable[[Ours], None] | None = None) -> dict[str, Any]:
    """Run to the end, letting `act` look at every new state; the hash, the ledger's verdict, the events."""
    started = time.monotonic()
    log = system.folder / "launch.log"
    try:
        system.start()
        while system.process.poll() is None:
            system.poll()
            if act is not None:
                act(system)
            if time.monotonic() - started > RUN_TIMEOUT_S:
                return {"error": f"did not finish in {RUN_TIMEOUT_S:.0f} s:\n{tail(log)}"}
            time.sleep(0.005)
        system.poll()
    finally:
        system.stop()
    finished = [e for e in system.events.rows if e["event"] == "run_finished"]
    if system.process.returncode != 0 or not finished:
        return {"error": f"ended with {system.process.returncode}:\n{tail(log)}"}
    generations = [e for e in system.events.rows if e["event"] == "generation"]
    return {
        "weights_sha256": finished[-1]["weights_sha256"],
        "seconds": round(time.monotonic() - started, 1),
        "generations": len(generations),
        "world_sizes": sorted({c["world_size"] for c in system.commits}),
        "failures": sum(e["event"] == "failure_detected" for e in system.events.rows),
        "joins": sum(e["event"] == "worker_joined" for e in system.events.rows),
        "lineage": max((c["lineage"] for c in system.commits), default=0),
        "ledger": verify(system.run_dir),
    }


def verify(run_dir: Path) -> str:
    """'exact', or what `elastic-harness verify` complains of."""
    done = subprocess.run(
        [*elastic_harness_argv(), "verify", str(run_dir)],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    return "exact" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-500:]


def exported_sha256(run_dir: Path) -> str:
    """The hash of the exported file's tensors, computed here from the definition."""
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(run_dir / "weights.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            value = file.get_tensor(name).contiguous()
            digest.update(name.encode() + b"\0" + str(value.dtype).removeprefix("torch.").encode() + b"\0")
            digest.update(",".join(str(n) for n in value.shape).encode() + b"\0")
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------- what may not change anything


@dataclass(frozen=True)
class Kill:
    """One moment of a schedule; `victims` None means every member at once."""

    after_step: int
    delay_s: float
    victims: int | None
    rank_0: bool


class Storm:
    """A seeded schedule of kills: after which committed step, how much later, how many members at once."""

    def __init__(self, seed: str, steps: int) -> None:
        rng = random.Random(seed)
        self.workers = rng.choice((2, 3, 4))
        self.spares = rng.choice((0, 1, 1, 2))
        moments = sorted(rng.sample(range(steps - 2), rng.choice((2, 3, 4))))
        self.plan = [
            Kill(at, round(rng.random() * 0.3, 4), rng.choice((1, 1, 1, 2)), rng.random() < 0.3) for at in moments
        ]
        if rng.random() < 0.1:
            self.plan[-1] = replace(self.plan[-1], victims=None)
        self._rng = rng
        self.killed: list[dict[str, Any]] = []

    def act(self, system: Ours) -> None:
        """Carry out what is due; the last member is spared, except where the schedule wants all dead."""
        if len(self.killed) == len(self.plan) or not system.commits:
            return
        due = self.plan[len(self.killed)]
        if max(c["step"] for c in system.commits) < due.after_step:
            return
        if due.victims is not None and len(system.victims()) < 2:
            return  # wait for a replacement first
        time.sleep(due.delay_s)
        system.poll()
        chosen = self._choose(due, system.victims())
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if chosen:
            self.killed.append({**asdict(due), "pids": chosen})

    def _choose(self, due: Kill, alive: list[int]) -> list[int]:
        """The processes to kill, of those alive in rank order."""
        if due.victims is None:
            return alive
        first = alive[:1] if due.rank_0 else []
        others = self._rng.sample([pid for pid in alive if pid not in first], len(alive) - len(first))
        return (first + others)[: max(0, min(due.victims, len(alive) - 1))]


class Resizer:
    """Asks for one number of workers after the other, each as soon as the one before has committed a few steps."""

    def __init__(self, plan: Sequence[int]) -> None:
        self.plan = list(plan)
        self.reached: list[int] = []
        self._asked: int | None = None

    def act(self, system: Ours) -> None:
        """Send the next request when it is due."""
        recent = [c["world_size"] for c in system.commits[-3:]]
        if self._asked is not None and recent == [self._asked] * 3:
            self.reached.append(self._asked)
            self._asked = None
        if self._asked is not None or not self.plan or len(recent) < 3:
            return
        workers = self.plan.pop(0)
        argv = [*elastic_harness_argv(), "scale", str(system.run_dir), "--workers", str(workers)]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"scale to {workers} failed with {done.returncode}: {done.stderr.strip()[-300:]}")
        self._asked = workers


def against(reference: str | None, result: dict[str, Any]) -> dict[str, Any]:
    """The result with `same`: does the hash equal the reference."""
    return {**result, "same": result.get("weights_sha256") == reference if reference else None}


# ---------------------------------------------------------------- what does, or might

EVIDENCE: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("same settings again", (), {}),
    ("2 threads", ("training.threads=2",), {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}),
    ("2 threads, again", ("training.threads=2",), {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}),
    ("torch.compile", ("trainer.compile=true",), {}),
    ("torch.compile, again", ("trainer.compile=true",), {}),
    ("ATEN_CPU_CAPABILITY=avx2", (), {"ATEN_CPU_CAPABILITY": "avx2"}),
    ("ATEN_CPU_CAPABILITY=default", (), {"ATEN_CPU_CAPABILITY": "default"}),
    ("ONEDNN_MAX_CPU_ISA=AVX2", (), {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    ("ONEDNN_MAX_CPU_ISA=SSE41", (), {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    ("MKL_CBWR=COMPATIBLE", (), {"MKL_CBWR": "COMPATIBLE"}),
    ("lanes=8 (24 slots)", ("training.lanes=8",), {}),
    ("lanes=12 (two slots each)", ("training.lanes=12",), {}),
)


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Any:
    """These environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def ddp_hash(workers: int, steps: int, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Plain DDP on the same data without dropout: the hash of its final weights."""
    argv = [sys.executable, "-m", "benchmarks.ddp_worker", "--config", str(CONFIG), "--steps", str(steps)]
    argv += ["model.dropout=0.0", *overrides]
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"ddp-{workers}-{r}.log" for r in range(workers)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for env, log in zip(ddp_environments(workers), logs, strict=True):
            sink = stack.enter_context(log.open("wb"))
            out = subprocess.PIPE if env["RANK"] == "0" else sink
            ranks.append(subprocess.Popen(argv, stdout=out, stderr=sink, env=env, cwd=folder))
        try:
            printed, _ = ranks[0].communicate(timeout=RUN_TIMEOUT_S)
            return dict(json.loads(printed.decode().strip().splitlines()[-1]))
        except (subprocess.TimeoutExpired, IndexError, ValueError) as problem:
            return {"error": f"{problem!r}: {tail(logs[0])}"}
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def main(argv: list[str] | None = None) -> int:
    """Run everything, print JSON, write results/exactness.json; 1 unless all that must agree agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 kill schedules, no evidence runs")
    parser.add_argument("--schedules", type=int, default=None, help="seeded kill schedules (default 50; quick: 3)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--resize-steps", type=int, default=200, help="of the runs that change their size")
    parser.add_argument("--parts", default="workers,resize,kills,evidence,ddp")
    parser.add_argument("--out", default=None)
    parser.add_argument("--keep", default=None, help="folder for the runs, kept")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    schedules = args.schedules if args.schedules is not None else (3 if args.quick else 50)
    parts = set(args.parts.split(",")) - ({"evidence", "ddp"} if args.quick else set())
    scratch = Path(args.keep) if args.keep else Path(tempfile.mkdtemp(prefix="bench-exactness-"))
    base = [f"training.max_steps={args.steps}", *args.overrides]

    def ours(name: str, workers: int, spares: int = 0, more: Sequence[str] = ()) -> Ours:
        return Ours(scratch / name, workers, CONFIG, [*base, *more], spares=spares, name=name)

    document: dict[str, Any] = {"config": CONFIG.read_text(), "steps": args.steps, "seed": args.seed}
    try:
        reference = run_to_end(ours("reference", 1))
        expected = reference.get("weights_sha256")
        with contextlib.suppress(OSError):
            exported = exported_sha256(scratch / "reference" / "run")
            reference["exported_weights_sha256"] = exported
            reference["same"] = exported == expected
        document["reference"] = reference
        say(f"reference {expected} {reference.get('error', '')}")
        must: list[dict[str, Any]] = [reference]
        if "workers" in parts:
            document["workers"] = {w: against(expected, run_to_end(ours(f"workers-{w}", w))) for w in (2, 3, 4)}
            must += document["workers"].values()
            say(f"workers {[r['same'] for r in document['workers'].values()]}")
        if "resize" in parts:
            longer = [f"training.max_steps={args.resize_steps}"]
            unchanged = run_to_end(ours("resize-reference", 1, more=longer))
            document["resize"] = {"steps": args.resize_steps, "reference": unchanged, "runs": []}
            for k, (start, plan) in enumerate(((2, (4, 1)), (4, (2, 3)))):
                resizer = Resizer(plan)
                result = run_to_end(ours(f"resize-{k}", start, more=longer), resizer.act)
                result = against(unchanged.get("weights_sha256"), result)
                document["resize"]["runs"].append({"start": start, "asked": plan, "reached": resizer.reached, **result})
                say(f"resize {start} {plan}: {result['same']}, reached {resizer.reached}")
            must += document["resize"]["runs"]
        if "kills" in parts:
            document["kills"] = []
            for k in range(schedules):
                storm = Storm(f"{args.seed}/{k}", args.steps)
                result = against(expected, run_to_end(ours(f"kills-{k}", storm.workers, storm.spares), storm.act))
                document["kills"].append(
                    {
                        "schedule": k,
                        "workers": storm.workers,
                        "spares": storm.spares,
                        "killed": storm.killed,
                        **result,
                    }
                )
                if result["same"] and not args.keep:
                    shutil.rmtree(scratch / f"kills-{k}", ignore_errors=True)
                dead = sum(len(x["pids"]) for x in storm.killed)
                say(
                    f"kills {k}: {storm.workers}+{storm.spares}, {dead} killed: {result['same']} "
                    f"{result.get('error', '')}"
                )
            must += document["kills"]
        if "evidence" in parts:
            document["evidence"] = {}
            for k, (name, more, env) in enumerate(EVIDENCE):
                with variables(env):
                    result = against(expected, run_to_end(ours(f"evidence-{k}", 1, more=more)))
                document["evidence"][name] = {"overrides": more, "environment": env, **result}
                say(f"evidence {name}: same as reference: {result['same']} {result.get('error', '')[-200:]}")
        if "ddp" in parts:
            hashes = {w: ddp_hash(w, args.steps, args.overrides, scratch / "ddp") for w in (1, 2, 3, 4)}
            distinct = {h["weights_sha256"] for h in hashes.values() if "weights_sha256" in h}
            document["plain_ddp"] = {"hashes": hashes, "distinct": len(distinct)}
            say(f"plain DDP on 1..4 workers: {len(distinct)} different hashes")
    finally:
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    good = [r for r in must if r.get("same") and r.get("ledger") == "exact"]
    document["verdict"] = {
        "runs_that_must_agree": len(must),
        "agree_with_exact_ledger": len(good),
        "workers_killed": sum(len(x["pids"]) for r in document.get("kills", ()) for x in r["killed"]),
        "pass": len(good) == len(must),
    }
    finish("exactness", document, args.out)
    return 0 if document["verdict"]["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
