"""Between two commits training state belongs to the harness: notices what user code does to it all the same.

What can be seen for some nanoseconds a tensor is looked at after every slot: a tensor's version (torch counts changes
in place), its address and its requires_grad. Settings, modules and objects are compared once a step. Changes that
leave no trace, through `.data` or NumPy, are found by hashing a part of the state: the same part after one commit and
before the next one, another part in each step. The hash goes into the header as well, so replicas that have come apart
for any reason are told from one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from elastic_harness.checkpoint.structure import encode
from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.errors import UserCodeError
from elastic_harness.train.batches import Batches
from elastic_harness.train.policies import Policies
from elastic_harness.train.refusals import check_hooks

PART_BYTES = 1 << 20
"""Of parameters, with their optimizer state on top, hashed in each step, unless PARTS_MAX asks for more."""
PARTS_MAX = 64
"""After about so many steps everything has been hashed."""
PIECES_MAX = 4
"""Tensors in one part: small ones cost by their number."""

Piece = tuple[str, Tensor, int, int]
"""A tensor and a range of its elements."""

READ_ONLY = "Between two commits training state may only be read"


class StateWatch:
    """Knows the state of `version` as the last commit, or a restore, has left it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[str],
        buffers: dict[str, Tensor],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        policies: Policies | None = None,
        batches: Batches | None = None,
    ) -> None:
        """trained: names of the parameters that have a place in the layout. buffers: those that are state."""
        self._optimizer = optimizer
        self._policies = policies or Policies(())
        self._batches = batches
        self._trained = set(trained)
        self._others = {name: part for name, part in (("scheduler", scheduler), ("scaler", scaler)) if part is not None}
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters())
        self._names, self._tensors = list(self._parameters), list(self._parameters.values())
        averages = dict(ema.named_parameters()) if isinstance(ema, nn.Module) else {}
        self._quiet = {f"ema.{name}": tensor for name, tensor in averages.items()}
        self._pieces = into_parts([*self._parameters.items(), *buffers.items(), *self._quiet.items()])
        self.parts = len(self._pieces)
        self.version = -1
        self._modes: list[bool] | None = None
        self._structure = self._structure_now()
        self.accept_state(-1)

    # ---- what is so

    def accept_state(self, version: int) -> None:
        """Take everything as it is now for the state of `version`. Local; after a commit or a restore."""
        self.version = version
        self._seen = self._seen_now()
        self._requires_grad = [p.requires_grad for p in self._tensors]
        self._quiet_versions = [t._version for t in self._quiet.values()]
        self._settings = self._settings_now()
        self._state = self._optimizer.state, [id(of) for of in self._optimizer.state.values()]
        self._expected = dict(self._part(version))

    def run_before_step(self, step: int, act: Callable[[int], None]) -> None:
        """Have `act` set requires_grad and the modules' modes for this step, and take these as it leaves them."""
        modes = self._modes_now()
        act(step)
        now = self._modes_now()
        if self._modes is not None:
            pairs = zip(self._modes, modes, now, strict=True)
            self._modes = [new if new != old else known for known, old, new in pairs]
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._trained:
                raise UserCodeError(
                    f"before_step has set requires_grad for {name}, which had none at start() and is not in the "
                    "optimizer: give the optimizer every parameter that is ever trained."
                )
        self._requires_grad = [p.requires_grad for p in self._tensors]

    # ---- what must still be so

    def check_slot(self, where: str) -> None:
        """Raise UserCodeError if a parameter was changed in place, moved, frozen or unfrozen. Some microseconds."""
        seen = self._seen_now()
        if seen != self._seen:
            pairs = zip(self._names, zip(*self._seen, strict=True), zip(*seen, strict=True), strict=True)
            name = next(name for name, before, after in pairs if before != after)
            raise UserCodeError(
                f"Parameter {name} was changed {where}. {READ_ONLY}: load weights before start(), evaluate other "
                "weights in a copy of the model, and do what shall follow every update (clamping, projecting) in "
                "optimizer.register_step_post_hook(), which runs inside the commit on every worker."
            )
        wanted = [p.requires_grad for p in self._tensors]
        if wanted != self._requires_grad:
            flags = zip(self._names, self._requires_grad, wanted, strict=True)
            name = next(name for name, before, after in flags if before != after)
            raise UserCodeError(
                f"requires_grad of parameter {name} was changed to {self._parameters[name].requires_grad} {where}, "
                "which a worker that joins would not know. Freeze and unfreeze in start(before_step=…), a function of "
                "the step's number."
            )

    def check_modes(self, where: str) -> None:
        """Raise UserCodeError if a module is in another mode than in the first slot."""
        now = self._modes_now()
        if self._modes is None:
            self._modes = now
        if now == self._modes:
            return
        names = [n for n, before, after in zip(self._modules, self._modes, now, strict=True) if before != after]
        mode = "training" if self._modules[names[0]].training else "evaluation"
        raise UserCodeError(
            f"Module {names[0] or '(the model)'} is in {mode} mode in {where} and was not in this worker's first slot "
            f"({len(names)} modules in all), so dropout and batch norm do something else. Call model.train() after an "
            "evaluation; modes that shall change with the step are set in start(before_step=…)."
        )

    def check_step(self, where: str) -> None:
        """Raise UserCodeError if anything that is compared once a step was changed."""
        self.check_slot(where)
        if self._structure_now() != self._structure:
            raise UserCodeError(
                f"A module or parameter of the model was replaced, added, tied or removed {where}. Build the whole "
                "model before start(); the harness sums the gradients of what it was given then."
            )
        check_hooks(self._parameters)
        for (name, tensor), version in zip(self._quiet.items(), self._quiet_versions, strict=True):
            if tensor._version != version:
                raise UserCodeError(
                    f"{name} was changed {where}. {READ_ONLY}; the harness updates what is given as ema=."
                )
        now = self._settings_now()
        if now != self._settings:
            path, before, after = next(differences(self._settings, now))
            raise UserCodeError(
                f"{path} was {before} after the last commit, and {after} {where}. {READ_ONLY}: give the schedule as "
                "scheduler= (LambdaLR takes any function of the step) and the scaler as scaler=, and leave their "
                "step() and update() to the harness; set global settings such as torch.set_num_threads before start()."
            )
        state, parts = self._state
        if self._optimizer.state is not state or [id(of) for of in state.values()] != parts:
            raise UserCodeError(
                f"The optimizer's state was replaced {where}. {READ_ONLY}: call optimizer.load_state_dict() before "
                "start()."
            )

    def checked_word(self, where: str) -> int:
        """Check that nothing was changed since the last commit, which raises UserCodeError, and return 63 bits of the
        hash over this step's part of the state, for the header."""
        self.check_step(where)
        now = dict(self._part(self.version))
        if now != self._expected:
            name = next((n for n in now if now[n] != self._expected.get(n)), "a tensor")
            raise UserCodeError(
                f"{name} was changed {where} in a way that torch does not count, such as `.data` or NumPy. "
                f"{READ_ONLY}: do what shall follow every update in optimizer.register_step_post_hook(), which runs "
                "inside the commit on every worker. If your code does nothing of the kind, check this machine's memory."
            )
        return self._word(now.items())

    def whole_word(self) -> int:
        """Return 63 bits of the hash over all parts of the state, never 0. Reads all of it."""
        return self._word(piece for number in range(self.parts) for piece in self._part(number))

    def _word(self, pieces: Iterable[tuple[str, int]]) -> int:
        digest = xxhash.xxh3_64(bytes(self._requires_grad))
        digest.update(f"{self._policies.word()}\n".encode())
        if self._batches is not None and self._batches.are_state:
            digest.update(f"{self._batches.word()}\n".encode())
        for name, value in pieces:
            digest.update(f"{name} {value}\n".encode())
        return digest.intdigest() >> 1 | 1

    def compared(self) -> str:
        """What the header's word is about, in words."""
        pieces = self._pieces[self.version % self.parts]
        return f"state of version {self.version} ({pieces[0][0]} … {pieces[-1][0]}, states of policies)"

    # ---- looking

    def _seen_now(self) -> tuple[list[int], list[int]]:
        return [p._version for p in self._tensors], [p.data_ptr() for p in self._tensors]

    def _modes_now(self) -> list[bool]:
        return [module.training for module in self._modules.values()]

    def _structure_now(self) -> list[list[int]]:
        return [[*map(id, m._modules.values()), *map(id, m._parameters.values())] for m in self._modules.values()]

    def _settings_now(self) -> dict[str, Any]:
        """All settings as plain values; of a tensor its version."""
        groups = self._optimizer.param_groups
        plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        tensors: dict[str, Tensor] = {}
        settings = {
            "torch.get_num_threads()": torch.get_num_threads(),
            "torch.get_default_dtype()": str(torch.get_default_dtype()),
            "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
            "optimizer.param_groups": encode(plain, "optimizer.param_groups", tensors),
            "optimizer.param_groups (parameters)": [list(map(id, group["params"])) for group in groups],
            **{name: encode(part.state_dict(), name, tensors) for name, part in self._others.items()},
        }
        return settings | {f"{path} (times written to)": tensor._version for path, tensor in tensors.items()}

    def _part(self, version: int) -> Iterator[tuple[str, int]]:
        """Every piece of the state that is looked at with this version, and its hash."""
        for name, tensor, lo, hi in self._pieces[version % self.parts]:
            yield name, _hash(tensor, lo, hi)
            state = self._optimizer.state.get(tensor, {})
            for key in sorted(state, key=str):
                value = state[key]
                if isinstance(value, Tensor):
                    split = value.numel() == tensor.numel()
                    if split or lo == 0:
                        yield f"optimizer.{name}.{key}", _hash(value, *((lo, hi) if split else (0, value.numel())))
                elif isinstance(value, int | float) and lo == 0:
                    yield f"optimizer.{name}.{key}", xxhash.xxh3_64_intdigest(repr(value).encode())


def into_parts(tensors: Sequence[tuple[str, Tensor]]) -> list[list[Piece]]:
    """All elements of the tensors, in parts of a bounded number of bytes and pieces."""
    limit = max(PART_BYTES, -(-sum(tensor.nbytes for _, tensor in tensors) // PARTS_MAX))
    parts: list[list[Piece]] = [[]]
    room = limit
    for name, tensor in tensors:
        lo, size = 0, tensor.element_size()
        while lo < tensor.numel():
            if room < size or len(parts[-1]) == PIECES_MAX:
                parts.append([])
                room = limit
            hi = min(tensor.numel(), lo + room // size)
            parts[-1].append((name, tensor, lo, hi))
            room -= (hi - lo) * size
            lo = hi
    return parts


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two nested plain values differ: the path, and both values there."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{path}.{index}")
    elif isinstance(before, list) and isinstance(after, list):
        yield path, f"a list of {len(before)}", f"one of {len(after)}"
    elif before != after:
        yield path, repr(before), repr(after)


def _hash(tensor: Tensor, lo: int, hi: int) -> int:
    return xxhash.xxh3_64_intdigest(content_of(tensor.detach().reshape(-1)[lo:hi]))
