"""What cannot be trained exactly, one case each: it has to be refused, not trained wrongly."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import elastic_harness


class Changing(nn.Module):
    """Changes a buffer that nobody declared: in place, or by assignment."""

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(1))
        self.assign = assign
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.assign:
            self.running = self.running + 1
        else:
            self.running += 1
        return self.linear(x)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x[:, 0].abs().long() % 10)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).real.sum(1, keepdim=True)


class Opaque:
    """State that cannot be written without pickle."""

    def state_dict(self) -> dict[str, Any]:
        return {"thing": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class Forgetful(torch.optim.SGD):
    """Does not load its momentum, which it has from the first step on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "state": {}})


class Rounding:
    """Gives its state back as another type."""

    def __init__(self) -> None:
        self.scale = torch.ones(1, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"].float()


CASES = (
    "lbfgs", "sparse", "complex", "buffer-in-place", "buffer-assigned", "no-backward", "two-backwards",
    "foreign-parameter", "plateau", "unknown-buffer", "frozen", "iterable", "empty", "break", "opaque",
    "forgetful", "rounding",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--run-dir")
    arguments = parser.parse_args()
    case = arguments.case
    torch.manual_seed(0)
    model: nn.Module = {
        "sparse": Sparse,
        "complex": Complex,
        "buffer-in-place": lambda: Changing(False),
        "buffer-assigned": lambda: Changing(True),
    }.get(case, lambda: nn.Linear(4, 1))()
    if case == "frozen":
        model.requires_grad_(False)
    parameters = list(model.parameters())
    if case == "foreign-parameter":
        parameters.append(nn.Parameter(torch.zeros(7)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1)
    if case == "lbfgs":
        optimizer = torch.optim.LBFGS(parameters)
    if case == "forgetful":
        optimizer = Forgetful(parameters, lr=0.1, momentum=0.9)
    extra = {"opaque": {"opaque": Opaque()}, "rounding": {"rounding": Rounding()}}.get(case)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer) if case == "plateau" else None
    dataset: Any = torch.randn(16, 4)
    if case == "iterable":
        dataset = iter(dataset)
    if case == "empty":
        dataset = []
    config = elastic_harness.Config.from_dict({"training": {"max_steps": 3, "global_batch_samples": 4}})
    run = elastic_harness.start(
        model,
        optimizer,
        dataset,
        config,
        scheduler=scheduler,
        buffers=["nothing"] if case == "unknown-buffer" else (),
        extra=extra,
        run_dir=arguments.run_dir,
    )
    for step in run.steps():
        for batch in step.micro_batches():
            loss = model(batch).pow(2).mean()
            if case == "break":
                break
            if case != "no-backward":
                step.backward(loss)
            if case == "two-backwards":
                step.backward(loss)
    print("was not refused")


if __name__ == "__main__":
    main()
