"""Reads a step's loss and gradient norm, and names the parameters whose gradients are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from elastic_harness.errors import UserCodeError


@dataclass(frozen=True)
class StepNumbers:
    """What a step's loss and gradients are. NaN stands for what was not given, if `…_given` is false."""

    loss: float
    grad_norm: float
    loss_given: bool
    norm_given: bool
    bad_parameters: tuple[str, ...] = ()  # whose gradients are not finite, as far as a model was given


def read_numbers(loss: Tensor | float | None, model: nn.Module | None, grad_norm: Tensor | float | None) -> StepNumbers:
    """Return a step's numbers. The norm is that of all gradients of the model, unless it is given. On a GPU this waits
    until both are computed. Parameters are looked at one by one only if the norm is not finite."""
    given = grad_norm
    if given is None and model is not None:
        given = get_total_norm(_gradients(model))
    norm = math.nan if given is None else _number("grad_norm", given)
    bad: tuple[str, ...] = ()
    if given is not None and not math.isfinite(norm) and model is not None:
        bad = tuple(name for name, gradient in _named(model) if not bool(torch.isfinite(gradient).all()))
        if not bad:  # the norm of finite gradients overflows in their type
            norm = math.hypot(*(float(torch.linalg.vector_norm(g, dtype=torch.float64)) for _, g in _named(model)))
    return StepNumbers(
        math.nan if loss is None else _number("loss", loss), norm, loss is not None, given is not None, bad
    )


def _gradients(model: nn.Module) -> list[Tensor]:
    gradients = [gradient for _, gradient in _named(model)]
    if not gradients:
        raise UserCodeError(
            "No parameter of the model has a gradient; call detector.step() after backward() and before zero_grad()."
        )
    return gradients


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the gradients that are there, by their parameters' names. Of a sparse one, the values that it holds."""
    found = [(name, p.grad.detach()) for name, p in model.named_parameters() if p.grad is not None]
    for name, gradient in found:
        if hasattr(gradient, "placements"):
            raise UserCodeError(
                f"The gradient of {name} is a DTensor, of which this rank has a part only; give grad_norm= in place of "
                "model=: clip_grad_norm_(model.parameters(), …).full_tensor()."
            )
    return [(name, g.coalesce().values() if g.is_sparse else g) for name, g in found]


def _number(name: str, value: Tensor | float) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserCodeError(f"{name} has the shape {tuple(value.shape)}, but must be one number; give its mean.")
    if hasattr(value, "placements"):
        raise UserCodeError(f"{name} is a DTensor, of which this rank has a part only; give {name}.full_tensor().")
    return float(value)
