"""Your own model and your own loop. What differs from a plain PyTorch script is marked with ◄.

    python examples/own_loop.py
    elastic-harness launch --nproc-per-node 4 examples/own_loop.py
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/own_loop.py

All three end on the same weights, bit for bit, whoever is killed on the way.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import elastic_harness  # ◄


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--run-dir", help="where to write when there is no launcher to say so")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.rand(1000, 2) * 2 - 1
    labels = ((inputs[:, 0] * inputs[:, 1]) > 0).long()  # the four quadrants, as a chessboard
    dataset = torch.utils.data.TensorDataset(inputs, labels)

    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    config = elastic_harness.Config.from_dict(  # ◄ instead of a DataLoader: 64 samples a step, in 16 slots of 4
        {
            "training": {"max_steps": arguments.steps, "global_batch_samples": 64, "micro_batch_samples": 4},
            "checkpoint": {"checkpoint_interval": 10},
        }
    )
    run = elastic_harness.start(  # ◄
        model, optimizer, dataset, config, scheduler=scheduler, run_dir=arguments.run_dir
    )
    for step in run.steps():  # ◄ instead of counting epochs and steps
        for x, y in step.micro_batches():  # ◄ instead of zero_grad(), optimizer.step(), scheduler.step()
            loss = F.cross_entropy(model(x), y)
            step.backward(loss)  # ◄ instead of loss.backward()
        if run.rank == 0 and run.step % 20 == 0:
            print(f"step {run.step:>4}  loss {step.loss:.4f}  workers {run.world_size}", flush=True)

    if run.rank == 0:
        model.eval()
        with torch.no_grad():
            right = (model(inputs).argmax(1) == labels).float().mean()
        print(f"accuracy {right:.3f}", flush=True)


if __name__ == "__main__":
    main()
