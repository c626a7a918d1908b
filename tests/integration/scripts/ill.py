"""Training in which one worker's machine computes wrong. Prints the hash of the whole training state at the end.

    python ill.py FAULT [--run-dir DIR] [--from-step S] [--times N] [--steps N] [--audit-interval K] [--block N]
                  [--blind]

nan: losses are NaN. gradient: gradients are infinite. spike: losses are 1000 times as large. bit: one bit of a gradient
is flipped. memory: one bit of a weight is flipped between two steps, once. sum: one bit of what the first owner of the
only block adds up is flipped. wire: one bit of a long message that the worker sends is flipped, once. The others happen
in that worker's next N micro-batches, or sums, after step S began. `--block`: so many elements of a sum are audited at
once, and the flipped bit is in the first of them. `--blind`: nobody compares anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from features import Table, let_the_others_begin, print_final_state, wait_for_a_checkpoint
from torch import Tensor, nn

import elastic_harness
from elastic_harness.comm import tcp
from elastic_harness.comm.exchange import Exchange
from elastic_harness.contract import variables
from elastic_harness.train import audits, loop
from elastic_harness.train.gate import gate
from elastic_harness.train.header import Header

ILL, FIRST_SAVED = "w1-1", 2


def flip(values: Tensor) -> None:
    """Flip a bit in the middle of the mantissa of one element."""
    values.view(torch.int32).view(-1)[3] ^= 1 << 12


def without_states(headers: Sequence[Header], *more: Any) -> Any:
    return gate([dataclasses.replace(header, state=0) for header in headers], *more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=("none", "nan", "gradient", "spike", "bit", "memory", "sum", "wire"))
    parser.add_argument("--run-dir")
    parser.add_argument("--from-step", type=int, default=7)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--audit-interval", type=lambda text: text if text == "auto" else int(text), default=0)
    parser.add_argument("--block", type=int)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--first-life-only", action="store_true", help="under torchrun the second worker is ill, once")
    arguments = parser.parse_args()
    let_the_others_begin()
    torch.manual_seed(11)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), *hidden, nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = elastic_harness.Config.from_dict(
        {
            "seed": 3,
            "training": {"max_steps": arguments.steps, "global_batch_samples": 12, "micro_batch_samples": 2},
            "health": {"on_spike": "skip_step", "spike_window": 8, "audit_interval": arguments.audit_interval},
            "checkpoint": {"checkpoint_interval": FIRST_SAVED, "keep_last": 50},
        }
    )
    member = os.environ.get(variables.MEMBER, "")
    ill, first_life, left, now = member == ILL, member in ("w0-1", "w1-1", "w2-1"), arguments.times, False
    if arguments.first_life_only:
        ill = os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def changed(gradient: Tensor) -> Tensor:
        if now and arguments.fault == "bit":
            gradient = gradient.clone()
            flip(gradient)
        return gradient * float("inf") if now and arguments.fault == "gradient" else gradient

    def reduce(exchange: Exchange, *more: Any) -> None:
        nonlocal left
        add_up(exchange, *more)
        if first_life and exchange._step >= arguments.from_step and left > 0:
            left -= 1
            flip(exchange.result)

    def flip_on_the_way(content: memoryview, tag: int) -> int:
        """Without the hash of what is sent nobody can tell: the receiver's bytes and the sender's differ by a bit."""
        nonlocal left
        if now and left > 0 and len(content) > 1000:
            left -= 1
            return hash_of(content, tag) ^ 1
        return hash_of(content, tag)

    model[0].weight.register_hook(changed)
    if arguments.fault == "sum":
        add_up, Exchange._reduce = Exchange._reduce, reduce
    if arguments.block is not None:
        audits.BLOCK = arguments.block
    if arguments.fault == "wire":
        hash_of, tcp.hash_of = tcp.hash_of, flip_on_the_way
    if arguments.blind:
        loop.is_doubtful = lambda *decided: False
        loop.gate = without_states
        loop.audit_sums = lambda *more: None
    run = elastic_harness.start(model, optimizer, Table(48, 12), config, run_dir=arguments.run_dir)
    for step in run.steps():
        if step.index == FIRST_SAVED + 1:
            wait_for_a_checkpoint(run)
        if ill and step.index == arguments.from_step and arguments.fault == "memory":
            flip(model[-1].weight.data)
        for batch in step.micro_batches():
            now = ill and step.index >= arguments.from_step and left > 0
            left -= now and arguments.fault not in ("sum", "wire")
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            if now and arguments.fault in ("nan", "spike"):
                loss = loss * (float("nan") if arguments.fault == "nan" else 1000.0)
            step.backward(loss)
    print_final_state(model, {"optimizer": optimizer})


if __name__ == "__main__":
    main()
