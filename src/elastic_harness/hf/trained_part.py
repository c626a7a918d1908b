"""Of a model with frozen parameters the part that is trained: adapters over a base, for example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn


class TrainedPart(nn.Module):
    """Shows of a model its trainable parameters and its buffers, under their names in the model, and all of its
    modules. Nothing else is exchanged, hashed in each step, handed to joiners or saved."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.whole = model

    def named_modules(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.whole.named_modules(*given, **named)

    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.whole.named_parameters(*given, **named):
            if parameter.requires_grad:
                yield name, parameter

    def named_buffers(self, *given: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self.whole.named_buffers(*given, **named)

    def state_dict(self, *given: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        frozen = {name for name, p in self.whole.named_parameters(remove_duplicate=False) if not p.requires_grad}
        state = self.whole.state_dict(*given, **named)
        return {name: value for name, value in state.items() if name not in frozen}


def frozen_word(model: nn.Module) -> str:
    """Return a hash over the frozen parameters, for the fingerprint; empty if there are none. Reads all of them."""
    digest, found = xxhash.xxh3_64(), False
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            found = True
            values = parameter.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest() if found else ""
