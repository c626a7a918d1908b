"""The whole training state as (JSON skeleton, tensors): what a joiner receives and a checkpoint stores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic_harness.checkpoint.structure import Skeleton, decode, encode
from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.errors import ConfigError


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Registry:
    """Everything that training changes, by name: the model and whatever has `state_dict` and `load_state_dict`."""

    def __init__(
        self, model: nn.Module, parts: Mapping[str, Stateful], changing: Mapping[str, Tensor] | None = None
    ) -> None:
        """`changing`: buffers that training changes; they are state even where they are not in the state_dict."""
        self.model = model
        self.parts = dict(parts)
        self._changing = dict(changing or {})

    def _own(self) -> dict[str, Tensor]:
        own = {f"model.{name}": buffer for name, buffer in self._changing.items()}
        return own | dict(model_tensors(self.model))

    def capture(self) -> tuple[Skeleton, dict[str, Tensor]]:
        """The state as a JSON-able skeleton and the live tensors it refers to, which stay as they are until the next
        commit. Not copies, except of the buffers that forward changes. Local, does not block."""
        tensors = self._own()
        tensors.update({f"model.{name}": buffer.clone() for name, buffer in self._changing.items()})
        skeleton: Skeleton = {}
        for name, part in self.parts.items():
            skeleton[name] = encode(part.state_dict(), name, tensors)
        return skeleton, tensors

    @torch.no_grad()
    def restore(self, skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the whole state. Raises ConfigError if the model or a registered object differs."""
        own = self._own()
        wanted = {name for name in tensors if name.startswith("model.")}
        if own.keys() != wanted or skeleton.keys() != self.parts.keys():
            missing = sorted((own.keys() - wanted) | (self.parts.keys() - skeleton.keys()))
            extra = sorted((wanted - own.keys()) | (skeleton.keys() - self.parts.keys()))
            raise ConfigError(
                f"The stored state is of another program: it lacks {missing or 'nothing'} and has {extra or 'nothing'} "
                "that this one does not know. Start with the same model, optimizer and registered objects, or use "
                "--fresh."
            )
        self._copy_model(own, tensors)
        for name, part in self.parts.items():
            part.load_state_dict(decode(skeleton[name], tensors))

    @torch.no_grad()
    def restore_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the model alone, with what the tensors of a whole state say of it. Raises ConfigError if it
        differs."""
        own = self._own()
        missing = sorted(own.keys() - tensors.keys())
        if missing:
            raise ConfigError(f"The stored state is of another model: it lacks {missing}. Start with the same model.")
        self._copy_model(own, tensors)

    @staticmethod
    def _copy_model(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
                raise ConfigError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} here but {tuple(tensors[name].shape)} "
                    f"{tensors[name].dtype} in the stored state: the model was changed. Use --fresh to begin anew."
                )
            tensor.copy_(tensors[name])


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and persistent buffers, named `model.<name>`."""
    persistent = model.state_dict(keep_vars=True).keys()
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.detach()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield f"model.{name}", buffer


def weights_sha256(model: nn.Module) -> str:
    """sha256 over parameters and persistent buffers in sorted name order, a tied one under its first name: name, NUL,
    dtype, NUL, shape joined by commas, NUL, little-endian bytes. Defined in docs/exactness.md."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    for name in sorted(state):
        tensor = state[name]
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        digest.update(content_of(tensor))
    return digest.hexdigest()
