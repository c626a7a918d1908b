"""Building a token index: MB of text per second, beside the bare tokenizer on the same text.

    python -m benchmarks.index_build [--mb 100]

The text is the Python standard library's source, repeated, in JSONL documents of 4,000 characters. tiktoken's own
vocabularies would need a download: a BPE of 32,000 is trained on the text, and its ranks are given to tiktoken as a
plugin. "Bare" is the tokenizer called on the documents' texts in memory, nothing read and nothing kept.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common import environment, finish, ratio_summary, say, summary, target

VOCABULARY = 32_000
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
PLUGIN = """
import base64, json
from pathlib import Path

def benchmark():
    made = json.loads((Path(__file__).parent.parent / "ranks.json").read_text())
    ranks = {base64.b64decode(token): rank for token, rank in made["ranks"]}
    return {"name": "benchmark", "pat_str": made["pattern"], "mergeable_ranks": ranks,
            "special_tokens": {"<|endoftext|>": len(ranks)}}

ENCODING_CONSTRUCTORS = {"benchmark": benchmark}
"""
BUILD = """
import json, resource, sys
from elastic_harness.data.index_builder import build
text, output, tokenizer, processes = sys.argv[1:]
seconds = build([text], output, tokenizer=tokenizer, processes=int(processes)).seconds
used = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([seconds, used]))
"""
BARE = """
import json, sys, time
from elastic_harness.data.tokenizers import restore
identity, file = json.loads(sys.argv[2]), open(sys.argv[3]).read() if len(sys.argv) > 3 else ""
tokenizer = restore(identity, file)
texts = [json.loads(line)["text"].encode() for line in open(sys.argv[1], "rb")]
if identity["kind"] == "tiktoken":
    encoding, strings = tokenizer._encoding, [text.decode() for text in texts]
    begun = time.perf_counter()
    for string in strings:
        encoding.encode_ordinary(string)
elif identity["kind"] == "huggingface":
    library, strings = tokenizer._tokenizer, [text.decode() for text in texts]
    begun = time.perf_counter()
    for low in range(0, len(strings), 256):
        library.encode_batch(strings[low:low + 256], add_special_tokens=False)
print(sum(map(len, texts)) / (time.perf_counter() - begun) / 1e6)
"""


def make_text(path: Path, megabytes: float) -> None:
    texts = [f.read_text(errors="replace") for f in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    written = 0
    with open(path, "w") as out:
        while written < megabytes * 1e6:
            for text in texts:
                for low in range(0, len(text), 4000):
                    line = json.dumps({"text": text[low : low + 4000]}) + "\n"
                    out.write(line)
                    written += len(line)
                if written >= megabytes * 1e6:
                    break


def byte_of_letter() -> dict[str, int]:
    """The letters by which byte-level BPEs write bytes (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


def make_ranks(tokenizer_json: str, folder: Path) -> None:
    """A trained BPE's merges as tiktoken's ranks, in a plugin that tiktoken finds."""
    letters = byte_of_letter()
    model = json.loads(tokenizer_json)["model"]
    tokens = [bytes([byte]) for byte in range(256)]
    for pair in model["merges"]:
        first, second = pair if isinstance(pair, list) else pair.split(" ")
        tokens.append(bytes(letters[letter] for letter in first + second))
    ranks = [[base64.b64encode(token).decode(), rank] for rank, token in enumerate(dict.fromkeys(tokens))]
    (folder / "ranks.json").write_text(json.dumps({"pattern": PATTERN, "ranks": ranks}))
    (folder / "tiktoken_ext").mkdir()
    (folder / "tiktoken_ext" / "benchmark.py").write_text(PLUGIN)


def text_mb(path: Path) -> float:
    return sum(len(json.loads(line)["text"].encode()) for line in open(path, "rb")) / 1e6


def build(env: dict[str, str], text: Path, output: Path, tokenizer: str, processes: int) -> tuple[float, int]:
    """Seconds of one build in a fresh process, and the most memory of any of its processes, in bytes."""
    output.unlink(missing_ok=True)
    command = [sys.executable, "-c", BUILD, str(text), str(output), tokenizer, str(processes)]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    seconds, kilobytes = json.loads(said)
    return seconds, kilobytes * 1024


def bare(env: dict[str, str], text: Path, identity: dict[str, str], file: str) -> float:
    """MB/s of the tokenizer alone."""
    command = [sys.executable, "-c", BARE, str(text), json.dumps(identity), *([file] if file else [])]
    return float(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


def measure(
    env: dict[str, str], text: Path, output: Path, spec: str, identity: dict[str, str], rounds: int
) -> dict[str, Any]:
    """Ours with one and two processes and the bare tokenizer, in turns."""
    megabytes = text_mb(text)
    speeds: dict[str, list[float]] = {"1": [], "2": [], "bare": []}
    peak = 0
    for _ in range(rounds):
        for processes in (1, 2):
            seconds, used = build(env, text, output, spec, processes)
            speeds[str(processes)].append(megabytes / seconds)
            peak = max(peak, used)
        if identity:
            speeds["bare"].append(bare(env, text, identity, "" if identity["kind"] == "tiktoken" else spec))
        say(f"{spec}: " + ", ".join(f"{k} {v[-1]:.1f}" for k, v in speeds.items() if v) + " MB/s")
    result: dict[str, Any] = {
        "text_mb": round(megabytes, 1),
        "input_mb": round(text.stat().st_size / 1e6, 1),
        "text_mb_per_s": {"1 process": summary(speeds["1"], 2), "2 processes": summary(speeds["2"], 2)},
        "two_over_one": ratio_summary(speeds["2"], speeds["1"]),
        "peak_rss_mib_of_a_process": round(peak / 2**20),
    }
    if identity:
        result["text_mb_per_s"]["bare tokenizer"] = summary(speeds["bare"], 2)
        result["one_over_bare"] = ratio_summary(speeds["1"], speeds["bare"])
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=60.0, help="of JSONL for a BPE; three times as much for bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="default: benchmarks/results/index_build.json")
    arguments = parser.parse_args(argv)
    from elastic_harness.data.tokenizers import train_bpe

    with tempfile.TemporaryDirectory(prefix="index-build-") as scratch:
        folder = Path(scratch)
        text, long_text = folder / "text.jsonl", folder / "long.jsonl"
        make_text(text, arguments.mb)
        make_text(long_text, 3 * arguments.mb)
        say("training the BPE")
        with open(text, "rb") as lines:
            trained = train_bpe((json.loads(line)["text"] for line in islice(lines, 10_000)), VOCABULARY)
        (folder / "tokenizer.json").write_text(trained.file)
        make_ranks(trained.file, folder)
        env = environment(TOKENIZERS_PARALLELISM="false")
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(folder)])
        output, rounds, tokenizer_file = folder / "out.bin", arguments.rounds, str(folder / "tokenizer.json")
        found = {
            "bytes": measure(env, long_text, output, "bytes", {}, rounds),
            "tiktoken": measure(
                env, text, output, "tiktoken:benchmark", {"kind": "tiktoken", "name": "benchmark"}, rounds
            ),
            "huggingface": measure(
                env, text, output, tokenizer_file, {"kind": "huggingface", "eot": "<|endoftext|>"}, rounds
            ),
        }
    of_input = found["bytes"]["input_mb"] / found["bytes"]["text_mb"]
    finish(
        "index_build",
        {
            "vocabulary": VOCABULARY,
            "tokenizers": found,
            "targets": {
                "tiktoken, one process / bare": target(
                    found["tiktoken"]["one_over_bare"]["median"], 0.9, at_least=True
                ),
                "bytes, MB of input per second, one process": target(
                    found["bytes"]["text_mb_per_s"]["1 process"]["median"] * of_input, 200.0, at_least=True
                ),
            },
        },
        arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
