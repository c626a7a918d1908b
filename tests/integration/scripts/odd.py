"""A small training in which one worker is odd: another number of threads, instruction set or model, arithmetic that
differs without any setting that would tell, or samples with noise that nothing has seeded.

python odd.py KIND LOCAL_RANK [--run-dir DIR]
"""

from __future__ import annotations

import argparse
import os


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = ("none", "threads", "isa", "model", "arithmetic", "noise", "drift", "raise", "raise-slot")
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("local_rank")
    parser.add_argument("--run-dir")
    arguments = parser.parse_args()
    odd = arguments.local_rank in ("all", os.environ.get("LOCAL_RANK", "0"))
    kind = arguments.kind if odd else "none"
    if kind == "isa":
        os.environ["ATEN_CPU_CAPABILITY"] = "default"

    import torch
    from torch import nn

    import elastic_harness

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3 if kind == "model" else 1))
    if kind == "arithmetic":
        model[0].weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "drift":
        optimizer.register_step_post_hook(lambda *_: drift())
    config = elastic_harness.Config.from_dict(
        {
            "training": {"max_steps": 20, "global_batch_samples": 8, "threads": 2 if kind == "threads" else 1},
            "checkpoint": {"checkpoint_interval": 5},
        }
    )
    dataset = torch.randn(40, 8)
    if kind == "noise":
        dataset += torch.randn(40, 8, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big")))
    run = elastic_harness.start(model, optimizer, dataset, config, run_dir=arguments.run_dir)

    def drift() -> None:
        """One bit of one weight, in the commit of step 7."""
        if run.step == 7:
            model[0].weight.data.view(torch.int32)[0, 0] ^= 1

    for step in run.steps():
        run.log("note", fatal=True, error="what a user logs never ends the job")
        if kind == "raise" and step.index == 7:
            raise ValueError("planted at step 7")
        for batch in step.micro_batches():
            if kind == "raise-slot" and step.index == 9 and bool((batch == dataset[3]).all()):
                raise ValueError("planted in sample 3")
            step.backward((model(batch).sum(1) - batch.sum(1)).pow(2).mean())


if __name__ == "__main__":
    main()
