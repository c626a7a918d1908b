"""The whole training state as (JSON skeleton, tensors): what a joiner receives and a checkpoint stores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic_harness.checkpoint.state import load_optimizer
from elastic_harness.checkpoint.structure import Skeleton, decode, encode, place_of
from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.errors import ConfigError
from elastic_harness.train.imprint import SHOWN_MAX, Imprint, differences, imprint, state_hash

MODULE_STATE = "module_state"  # what modules give with get_extra_state, beside what is registered
FORMAT = "$format"  # of a skeleton; those that say nothing say less of all but their tensors


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class ExtraState:
    """What the modules of a model give with `get_extra_state`, by module: a part of the state like any other."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            name: module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self.modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, module in self.modules.items():
            module.set_extra_state(state[name])


class Registry:
    """Everything that training changes, by name: the model and whatever has `state_dict` and `load_state_dict`."""

    def __init__(
        self, model: nn.Module, parts: Mapping[str, Stateful], changing: Mapping[str, Tensor] | None = None
    ) -> None:
        """`changing`: buffers that training changes; they are state even where they are not in the state_dict."""
        self.model = model
        self.parts = dict(parts)
        extra = ExtraState(model)
        if extra.modules:
            self.parts[MODULE_STATE] = extra
        self._changing = dict(changing or {})

    def _own(self) -> dict[str, Tensor]:
        own = {f"model.{name}": buffer for name, buffer in self._changing.items()}
        return own | dict(model_tensors(self.model))

    def capture(self) -> tuple[Skeleton, dict[str, Tensor]]:
        """The state as a JSON-able skeleton and the live tensors it refers to, which stay as they are until the next
        commit. Not copies, except of the buffers that forward changes. Local, does not block."""
        tensors = self._own()
        known = {place: name for name, tensor in tensors.items() if (place := place_of(tensor)) is not None}
        tensors.update({f"model.{name}": buffer.clone() for name, buffer in self._changing.items()})
        skeleton: Skeleton = {FORMAT: 2}
        for name, part in self.parts.items():
            skeleton[name] = encode(part.state_dict(), name, tensors, known)
        return skeleton, tensors

    @torch.no_grad()
    def restore(
        self, skeleton: Skeleton, tensors: Mapping[str, Tensor], hashes: Mapping[str, bytes] | None = None
    ) -> tuple[str, str]:
        """Overwrite the whole state; return the hash of what was given, and of what is held then, which was captured
        anew and is the same to the bit. hashes: those of the tensors, where they are known. Raises ConfigError if the
        model or a registered object differs, or does not give back what it has loaded."""
        parts = self._fitting(skeleton, tensors)
        given = imprint(skeleton, tensors, hashes)  # first: an object may keep these very tensors, and write to them
        own = self._own()
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for name in parts:
            self._load(name, skeleton, {**tensors, **own})
        held = imprint(*self.capture())
        if FORMAT not in skeleton:
            known = {name: held["tensors"][name] for name in given["tensors"] if name in held["tensors"]}
            held = {"skeleton": given["skeleton"], "tensors": known}
        _prove(given, held)
        return state_hash(given), state_hash(held)

    def _fitting(self, skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> list[str]:
        """The registered objects that have a stored state. Raises ConfigError if it is of another program."""
        own, parts = self._own(), self.parts.keys() if FORMAT in skeleton else self.parts.keys() - {MODULE_STATE}
        wanted, stored = {name for name in tensors if name.startswith("model.")}, skeleton.keys() - {FORMAT}
        if own.keys() != wanted or stored != parts:
            missing = sorted((own.keys() - wanted) | (parts - stored))
            extra = sorted((wanted - own.keys()) | (stored - parts))
            raise ConfigError(
                f"The stored state is of another program: it lacks {missing or 'nothing'} and has {extra or 'nothing'} "
                "that this one does not know. Start with the same model, optimizer and registered objects, or use "
                "--fresh."
            )
        _check_model(own, tensors)
        return [name for name in self.parts if name in parts]

    @torch.no_grad()
    def restore_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the model alone, with what the tensors of a whole state say of it. Raises ConfigError if it
        differs."""
        own = self._own()
        missing = sorted(own.keys() - tensors.keys())
        if missing:
            raise ConfigError(f"The stored state is of another model: it lacks {missing}. Start with the same model.")
        _check_model(own, tensors)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def rehearse(self) -> None:
        """Load copies of what the registered objects hold into them, as a restore would. Raises ConfigError if
        anything is different then. It costs the memory of those copies for a moment: on the CPU for an optimizer or a
        module, which put what they load where it belongs."""
        skeleton, tensors = self.capture()
        given = imprint(skeleton, tensors)
        own = self._own()
        placing = {name for name, part in self.parts.items() if isinstance(part, nn.Module | torch.optim.Optimizer)}
        copies = {
            name: tensor.to("cpu" if name.split(".")[0] in placing else tensor.device, copy=True).contiguous()
            for name, tensor in tensors.items()
            if name not in own
        }
        for name in self.parts:
            self._load(name, json.loads(json.dumps(skeleton)), copies | own)
        _prove(given, imprint(*self.capture()))

    def _load(self, name: str, skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> None:
        part, state = self.parts[name], decode(skeleton[name], tensors)
        if isinstance(part, torch.optim.Optimizer):
            load_optimizer(part, state)
        else:
            part.load_state_dict(state)


def _prove(given: Imprint, held: Imprint) -> None:
    """Raise ConfigError, naming what differs, if what is held is not what was given."""
    found = list(differences(given, held))
    if found:
        more = f", and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        raise ConfigError(
            f"State does not survive load_state_dict(): {'; '.join(found[:SHOWN_MAX])}{more}. A worker that joins or "
            "is restarted would go on with other state than the one it was given. Correct that object's state_dict() "
            "and load_state_dict(), so that the one gives back what the other was given, with its types."
        )


def _check_model(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a stored tensor of the model has another shape or type than its own."""
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise ConfigError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} here but {tuple(tensors[name].shape)} "
                f"{tensors[name].dtype} in the stored state: the model was changed. Use --fresh to begin anew."
            )


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and persistent buffers, named `model.<name>`."""
    persistent = model.state_dict(keep_vars=True).keys()
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.detach()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield f"model.{name}", buffer


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under their state_dict names, sorted; a tied one once, under the first."""
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    for name in sorted(state):
        if id(state[name]) not in seen and not is_extra_state(name):
            seen.add(id(state[name]))
            yield name, state[name]


def is_extra_state(name: str) -> bool:
    """Whether a name in a model's state_dict is that of what a module's `get_extra_state` gives."""
    return name.rpartition(".")[2] == "_extra_state"


def weights_sha256(model: nn.Module) -> str:
    """sha256 over parameters and persistent buffers in sorted name order, a tied one under its first name: name, NUL,
    dtype, NUL, shape joined by commas, NUL, little-endian bytes. Defined in docs/exactness.md."""
    digest = hashlib.sha256()
    for name, tensor in weights(model):
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        digest.update(content_of(tensor))
    return digest.hexdigest()
