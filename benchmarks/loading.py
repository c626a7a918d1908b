"""Reading pre-tokenized text in random order, and resuming at half an epoch, beside the loaders people use.

    python -m benchmarks.loading [--rounds 5]

Each system runs alone in a process, in turns, over the same random tokens in its own format, page cache hot, at each of
its settings; the ratios are to each one's best. `torch_by_item` is the data set that most training scripts have (an
item is a window, collated by the loader); `torch` and `stateful` are given a data set that gathers a whole batch the
way ours does, the fastest that can be written for them. What resuming costs ours at any size is measured on a virtual
index behind the public data set: its tokens are computed, the rest is real.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import HERE, environment, finish, ratio_summary, say, summary, target

SEQ_LENGTH, BATCH = 1024, 32
SETTINGS: dict[str, tuple[int, ...]] = {
    "ours": (0,),
    "torch_by_item": (0, 2),
    "torch": (0, 2),
    "stateful": (0, 2),
    "grain": (0, 1, 2),
    "litdata": (0, 2),
    "mosaic": (0, 2),
}
WORKER = HERE / "rivals" / "loading_worker.py"
TIMEOUT_S = 300.0


class VirtualIndex:
    """An index of any size whose tokens are a function of their place."""

    remote, eot_id, vocab_size = False, 0, 50_000
    path, packing, fingerprint = "virtual", None, "0" * 32
    tokenizer: dict[str, Any] = {"kind": "virtual"}
    documents = keys = np.zeros(0, np.uint64)

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        return ((starts[:, None] + np.arange(length)) % 50_000).astype(np.uint16)

    def prefetch(self, starts: npt.NDArray[np.int64], length: int) -> None: ...


def run(python: str, system: str, folder: Path, *options: object) -> dict[str, Any]:
    """One process of the worker; its last line of JSON, or {"error": …}."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    env = environment(DATA_OPTIMIZER_CACHE_FOLDER=str(folder / "litdata-cache"), TMPDIR=str(temporary))
    shared = set(os.listdir("/dev/shm"))
    command = [python, "-W", "ignore", str(WORKER), system, str(folder), *map(str, options)]
    try:
        ended = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {TIMEOUT_S:.0f} s"}
    finally:  # what a rival leaves behind is not left behind
        for name in set(os.listdir("/dev/shm")) - shared:
            Path("/dev/shm", name).unlink(missing_ok=True)
    for line in reversed(ended.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"error": " ".join((ended.stderr or ended.stdout).split())[-300:]}


def reading(python: str, folder: Path, rounds: int, measure_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples per second of each system at each setting, and the ratios of ours to each one's best."""
    found: dict[str, dict[str, list[float]]] = {}
    errors: dict[str, str] = {}
    for number in range(rounds):
        for system, settings in SETTINGS.items():
            for workers in settings:
                name = f"{system}/{workers}"
                if name in errors:
                    continue
                got = run(python, system, folder, "--workers", workers, "--batch", BATCH, "--measure-s", measure_s)
                if "error" in got:
                    errors[name] = got["error"]
                    continue
                found.setdefault(system, {}).setdefault(str(workers), []).append(got["samples_per_s"])
                say(f"round {number + 1} {name}: {got['samples_per_s']:,.0f} samples/s")
    table, best = {}, {}
    for system, settings in found.items():
        whole = {workers: values for workers, values in settings.items() if len(values) == rounds}
        if not whole:
            continue
        chosen = max(whole, key=lambda workers: statistics.median(whole[workers]))
        best[system] = whole[chosen]
        table[system] = {
            "best_setting": {"threads" if system == "grain" else "workers": int(chosen)},
            "samples_per_s": {workers: summary(values, 0) for workers, values in settings.items()},
        }
    ratios = {system: ratio_summary(best["ours"], values) for system, values in best.items() if system != "ours"}
    return {"systems": table, "errors": errors}, ratios


def resuming(python: str, folder: Path, batches: int) -> dict[str, Any]:
    """Seconds to the first batch from a state at half an epoch, in a loader that has just been made."""
    found = {}
    for system in SETTINGS:
        got = run(python, system, folder, "--workers", 0, "--batch", BATCH, "--resume-after", batches)
        found[system] = got
        say(f"resume {system}: {got}")
    return found


def resuming_at_any_size(samples: int, rounds: int = 30) -> dict[str, Any]:
    """Milliseconds of ours at half an epoch: `load_state_dict` and the first batch, on a virtual index."""
    import torch

    from elastic_harness.data import ResumableDataset, ResumableLoader

    torch.set_num_threads(1)

    def make() -> ResumableLoader:
        dataset = ResumableDataset(VirtualIndex(samples * SEQ_LENGTH + 1), SEQ_LENGTH, 7)
        return ResumableLoader(dataset, batch_size=BATCH)

    state = make().state_dict() | {"position": samples // 2}
    times = []
    for _ in range(rounds):
        loader = make()
        begun = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        times.append((time.perf_counter() - begun) * 1000)
    return {"samples": samples, "state_bytes": len(json.dumps(state)), "ms": summary(times)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--measure-s", type=float, default=2.0)
    parser.add_argument("--out", help="default: benchmarks/results/loading.json")
    arguments = parser.parse_args(argv)
    made = subprocess.run([str(HERE / "data_rivals_env.sh")], stdout=subprocess.PIPE, text=True)
    python = made.stdout.split()[-1] if made.returncode == 0 and made.stdout.strip() else sys.executable
    with tempfile.TemporaryDirectory(prefix="loading-") as scratch:
        folder = Path(scratch)
        prepared = run(python, "prepare", folder, "--tokens", arguments.tokens, "--seq-length", SEQ_LENGTH)
        if "error" in prepared:
            say(f"the data could not be prepared: {prepared['error']}")
            return 1
        table, ratios = reading(python, folder, arguments.rounds, arguments.measure_s)
        batches = (arguments.tokens // SEQ_LENGTH) // BATCH // 2
        resumed = resuming(python, folder, batches)
    fastest = min(ratios, key=lambda system: ratios[system]["median"]) if ratios else None
    by_item = [r["median"] for s, r in ratios.items() if s not in ("torch", "stateful")]
    sizes = [resuming_at_any_size(10**exponent) for exponent in (5, 9, 12)]
    finish(
        "loading",
        {
            "what": f"random order, {SEQ_LENGTH} tokens, batches of {BATCH}, {arguments.tokens:,} random uint16 tokens",
            "environment": {"python": python, "not_prepared": prepared["missing"]},
            **table,
            "ratio_of_ours_to": ratios,
            "resume_at_half_an_epoch": {"samples": arguments.tokens // SEQ_LENGTH, **resumed},
            "resume_of_ours_at_any_size": sizes,
            "targets": {
                "ours / fastest of all": target(ratios[fastest]["median"] if fastest else None, 1.5, at_least=True),
                "ours / fastest that is not given our gathering": target(
                    min(by_item, default=None), 1.5, at_least=True
                ),
                "resume ms at 1e12 samples": target(sizes[-1]["ms"]["median"], 1.0),
                "resume ms at 1e5 samples": target(sizes[0]["ms"]["median"], 1.0),
            },
            "fastest_rival": fastest,
        },
        arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
