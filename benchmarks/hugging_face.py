"""How fast is ElasticTrainer beside Hugging Face's own Trainer, at equal settings? One worker each, in turns.

Each turn is a process of its own, because a Trainer keeps its process for itself. The order within a pair alternates. A
step is timed from one `on_step_end` to the next, by the clock and in CPU time of the process: on a machine that others
use, CPU time is the better figure. The losses of both are compared, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.common import environment, finish, ratio_summary, say, target

SYSTEMS = ("ours", "transformers")
WARM_UP = 3
GOAL = 0.97


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out")
    parser.add_argument("--turn", choices=SYSTEMS, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.turn:
        print(json.dumps(turn(given.turn, given.steps)))
        return 0
    turns: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for pair in range(given.pairs):
        for system in SYSTEMS if pair % 2 == 0 else reversed(SYSTEMS):
            command = [sys.executable, "-m", "benchmarks.hugging_face", "--turn", system, "--steps", str(given.steps)]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
            if done.returncode:
                say(done.stderr[-2000:])
                return 1
            turns[system].append(json.loads(done.stdout.splitlines()[-1]))
        say(f"pair {pair + 1}: " + ", ".join(f"{s} {turns[s][-1]['cpu_s']:.3f} CPU s a step" for s in SYSTEMS))
    ratios = {
        unit: ratio_summary([t[unit] for t in turns["transformers"]], [t[unit] for t in turns["ours"]])
        for unit in ("cpu_s", "wall_s")
    }
    losses = zip(*(turns[system][0]["losses"] for system in SYSTEMS), strict=True)
    result = {
        "question": "steps per second of ElasticTrainer over those of transformers.Trainer, one worker, equal settings",
        "transformers": turns["ours"][0]["version"],
        "parameters": turns["ours"][0]["parameters"],
        "steps_timed": given.steps - WARM_UP,
        "throughput_ratio": ratios,
        "largest_difference_of_a_logged_loss": max(abs(ours - theirs) for ours, theirs in losses),
        "seconds_per_step": {s: {u: [round(t[u], 4) for t in turns[s]] for u in ("cpu_s", "wall_s")} for s in SYSTEMS},
        "goal": target(ratios["cpu_s"]["median"], GOAL, at_least=True),
    }
    finish("hugging_face", result, given.out)
    return 0


def turn(system: str, steps: int) -> dict[str, Any]:
    """Train; return the medians over the steps after the first ones."""
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from elastic_harness.data.order import epoch_order
    from elastic_harness.hf import ElasticTrainer

    samples, length = 512, 128
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (samples, length))
    data = [{"input_ids": row, "labels": row} for row in ids]
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=length, **sizes))
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    class InOurOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> list[int]:
            return [int(number) for number in epoch_order(samples, 42, 0)(range(samples))]

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=8,
            max_steps=steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        kind = ElasticTrainer if system == "ours" else InOurOrder
        trainer = kind(model=model, args=args, train_dataset=data, callbacks=[Clock()])
        trainer.train()
    steps_taken = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(marks[WARM_UP - 1 :], marks[WARM_UP:], strict=False)]
    return {
        "version": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": statistics.median(wall for wall, _ in steps_taken),
        "cpu_s": statistics.median(cpu for _, cpu in steps_taken),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


if __name__ == "__main__":
    sys.exit(main())
