"""A convolutional network with batch norm, a moving average of the weights, and a learning-rate schedule.

    elastic-harness launch --nproc-per-node 4 examples/batch_norm.py

Every slot starts from the running statistics of the step before, and their mean over the slots is the new value: the
same on one worker and on many. The statistics used in training are those of one micro-batch, so micro-batches should
not be tiny.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic_harness


class Shapes(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Noisy 16 × 16 pictures of a disc or a ring, made from the sample's number alone."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        x, y, radius = (torch.rand(3, generator=generator) * torch.tensor([6, 6, 3]) + torch.tensor([5, 5, 3])).tolist()
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        distance = ((rows - y) ** 2 + (columns - x) ** 2).sqrt()
        ring = index % 2
        picture = ((distance < radius) & (distance > radius - 2 if ring else distance >= 0)).float()
        return (picture + 0.3 * torch.randn(16, 16, generator=generator)).unsqueeze(0), ring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--run-dir", help="where to write when there is no launcher to say so")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 2)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=arguments.steps + 1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    config = elastic_harness.Config.from_dict(
        {"training": {"max_steps": arguments.steps, "global_batch_samples": 128, "micro_batch_samples": 16}}
    )
    run = elastic_harness.start(
        model, optimizer, Shapes(), config, scheduler=scheduler, ema=ema, run_dir=arguments.run_dir
    )
    for step in run.steps():
        for pictures, rings in step.micro_batches():
            step.backward(F.cross_entropy(model(pictures), rings))
        if run.rank == 0 and run.step % 20 == 0:
            print(f"step {run.step:>4}  loss {step.loss:.4f}  workers {run.world_size}", flush=True)

    if run.rank == 0:
        ema.eval()
        unseen = [Shapes()[index] for index in range(4096, 4352)]
        with torch.no_grad():
            guessed = ema(torch.stack([picture for picture, _ in unseen])).argmax(1)
        right = (guessed == torch.tensor([ring for _, ring in unseen])).float().mean()
        print(f"accuracy of the averaged weights on unseen pictures {right:.3f}", flush=True)


if __name__ == "__main__":
    main()
