"""Trains a small network to continue text, one character at a time. Put your own model and data in its place.

    elastic-harness launch --nproc-per-node 2 --run-dir runs/first train.py
    elastic-harness kill runs/first rank1        # in another terminal, while it trains
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic_harness

HERE = Path(__file__).parent


class Text(torch.utils.data.Dataset[Tensor]):
    """Sample i is `length` + 1 bytes of the text, from byte i · length on. Nothing here knows of workers."""

    def __init__(self, text: bytes, length: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._length = length

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._length

    def __getitem__(self, index: int) -> Tensor:
        begin = index * self._length
        return self._bytes[begin : begin + self._length + 1]


class Net(nn.Module):
    """Says for each byte what the next one will be."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(x))[0])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean over the batch, in nats per byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a file to learn")
    parser.add_argument("--run-dir", help="where to write under plain python; `launch` says it otherwise")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings in place of config.yaml's")
    given = parser.parse_args()

    torch.manual_seed(0)  # before the model is built: two runs begin with the same weights
    config = elastic_harness.load_config(elastic_harness.Config, HERE / "config.yaml", given.overrides)
    dataset = Text(given.text.read_bytes(), length=64)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    run = elastic_harness.start(model, optimizer, dataset, config, run_dir=given.run_dir)
    for step in run.steps():
        for batch in step.micro_batches():  # those that fall to this worker
            step.backward(partial(loss_of, model, batch))
        if run.rank == 0 and run.step % 10 == 0:
            print(f"step {run.step:>4}  loss {step.loss:.4f}  workers {run.world_size}", flush=True)


if __name__ == "__main__":
    main()
