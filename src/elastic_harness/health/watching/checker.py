"""Compares the state of all ranks of a process group, bit for bit.

    checker = ConsistencyChecker({"model": model, "optimizer": optimizer})
    for step, batch in enumerate(loader):
        …
        report = checker.check_part(step)       # a 64th of the state: all of it in 64 steps
        if not report.ok:
            raise SystemExit(str(report))       # names the ranks and the tensors

Ranks send hashes. They send names only if the hashes differ. There is no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed
import xxhash
from torch import Tensor

from elastic_harness.checkpoint.ranks import Ranks
from elastic_harness.checkpoint.sharding import is_distributed
from elastic_harness.checkpoint.structure import encode
from elastic_harness.checkpoint.tensors import flat_bytes
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.health.consistency import ConsistencyReport, compare

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PARTS = 64
TEXT_CHARS_MAX = 200  # of a plain value that is sent; of a longer one its hash is sent
Table = dict[str, str]


class HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Held:
    """What a rank holds, as texts to compare."""

    layout: Table = field(default_factory=dict)  # tensors: type and shape
    values: Table = field(default_factory=dict)  # tensors: a hash; plain values as JSON
    left_out: tuple[str, ...] = ()
    compared_bytes: int = 0


class ConsistencyChecker:
    """Compares these objects' `state_dict()`s, or these dicts, between the ranks of a group (None: the default group).

    ignore: patterns such as "*.running_mean", of names that may differ. In DDP the running statistics of a batch norm
    do, until rank 0's are sent around at the next forward.

    Of a DTensor each rank compares what it holds, if all ranks of the group hold the same part of it: all of it, or
    with hybrid sharding in the group of the replicas, `mesh["replicate"].get_group()`. Others are left out, and the
    report names them.

    All ranks make one with the same settings. Making one is local.
    """

    def __init__(
        self,
        states: Mapping[str, HasState | Mapping[str, Any]],
        group: ProcessGroup | None = None,
        *,
        parts: int = PARTS,
        ignore: Sequence[str] = (),
    ) -> None:
        if parts < 1:
            raise ConfigError(f"parts is {parts}, but must be at least 1; each check_part compares one of so many.")
        self._states, self._parts, self._ignore = dict(states), parts, tuple(ignore)
        self._ranks = Ranks(group)
        if self._ranks.rank < 0:
            raise UserCodeError("This rank is not in the group; make a ConsistencyChecker on the group's ranks only.")
        self._names = _global_ranks(group, self._ranks.world)
        self._varies: dict[tuple[Any, int], bool] = {}

    def check(self) -> ConsistencyReport:
        """Compare all of the state now. Collective: all ranks call it at the same step, between two updates. Blocks
        until all have hashed their state, or the group's timeout. Raises UserCodeError on all ranks if one cannot give
        its state, or takes part in another check."""
        return self._check(0, 1)

    def check_part(self, step: int) -> ConsistencyReport:
        """Compare one of `parts` parts of the tensors' bytes, another one with each step, and all plain values. The
        parts are equally large. Collective, and raises, as `check`."""
        return self._check(step % self._parts, self._parts)

    def _check(self, part: int, parts: int) -> ConsistencyReport:
        said, failure, mine = {"part": f"{part + 1} of {parts}"}, None, _Held()
        try:
            mine = self._held(part, parts)
            said |= {"layout": _hash_of(mine.layout), "values": _hash_of(mine.values)}
        except Exception as error:  # process boundary: the others wait for what this rank says
            said["error"], failure = str(error) or repr(error), error
        heard = self._gather(said)
        self._refuse(heard, failure)
        if _differ(heard, "layout"):  # then no part is the same bytes on all ranks
            return ConsistencyReport(compare(self._gather(mine.layout)), 0)
        differences = compare(self._gather(mine.values)) if _differ(heard, "values") else ()
        return ConsistencyReport(differences, mine.compared_bytes, mine.left_out)

    def _refuse(self, heard: Mapping[int, Table], failure: Exception | None) -> None:
        """Raise on all ranks alike if a rank could not take part."""
        for rank, said in heard.items():
            if "error" in said:
                raise UserCodeError(f"Rank {rank} cannot take part: {said['error']}") from failure
        if len({said["part"] for said in heard.values()}) > 1:
            at = ", ".join(f"rank {rank} part {said['part']}" for rank, said in heard.items())
            raise UserCodeError(f"The ranks compare different parts ({at}); call check_part with the same step on all.")

    def _gather(self, table: Table) -> dict[int, Table]:
        """Return every rank's table, by its rank in the default group."""
        told = self._ranks.gather(json.dumps(table, sort_keys=True).encode())
        return {rank: json.loads(each) for rank, each in zip(self._names, told, strict=True)}

    def _held(self, part: int, parts: int) -> _Held:
        """Return what this rank holds of a part."""
        found: dict[str, Tensor] = {}
        plain: Table = {}
        for name, state in self._states.items():
            values = state if isinstance(state, Mapping) else state.state_dict()
            for path, text in _leaves(encode(values, name, found), name):
                plain[path] = plain.get(path, "") + text
        self._check_patterns([*found, *plain])
        local = {name: self._comparable(found[name]) for name in sorted(found) if not self._ignored(name)}
        tensors = {name: tensor for name, tensor in local.items() if tensor is not None}
        left_out = tuple(name for name, tensor in local.items() if tensor is None)
        if left_out and not tensors:
            raise ConfigError(
                f"No tensor is the same on all ranks of this group: {left_out[0]} is sharded, as all others are. With "
                'hybrid sharding give group=mesh["replicate"].get_group(); with full sharding there are no replicas.'
            )
        layout = {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()}
        hashes, compared_bytes = _hashes(tensors, part, parts)
        shown = {name: text if len(text) <= TEXT_CHARS_MAX else _hash_of(text) for name, text in plain.items()}
        values = hashes | {name: text for name, text in shown.items() if not self._ignored(name)}
        return _Held(layout | dict.fromkeys(left_out, "sharded"), values, left_out, compared_bytes)

    def _check_patterns(self, names: Sequence[str]) -> None:
        for pattern in self._ignore:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"ignore={pattern!r} fits no name of the state; names are like {names[:3]}.")

    def _ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, each) for each in self._ignore)

    def _comparable(self, tensor: Tensor) -> Tensor | None:
        """Return what this rank holds of a tensor, if all ranks of the group should hold the same; else None."""
        if not is_distributed(tensor):
            return tensor
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        for dimension, placement in enumerate(placements):
            if placement.is_partial() or (not placement.is_replicate() and self._differ_along(mesh, dimension)):
                return None
        return tensor.to_local()  # type: ignore[attr-defined]

    def _differ_along(self, mesh: Any, dimension: int) -> bool:
        """Return whether ranks of the group stand at different places along this dimension of a mesh."""
        if (mesh, dimension) not in self._varies:
            places = [(mesh.mesh == rank).nonzero()[:, dimension].tolist() for rank in self._names]
            self._varies[mesh, dimension] = any(place != places[0] for place in places)
        return self._varies[mesh, dimension]


def _differ(heard: Mapping[int, Table], what: str) -> bool:
    return len({said[what] for said in heard.values()}) > 1


def _global_ranks(group: ProcessGroup | None, world: int) -> list[int]:
    return list(range(world)) if group is None else torch.distributed.get_process_group_ranks(group)


def _hashes(tensors: Mapping[str, Tensor], part: int, parts: int) -> tuple[Table, int]:
    """Return xxh3 over the bytes of each tensor that lie in this part of all bytes, and their number. Only these bytes
    are copied from a GPU."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    low, high = (total * index // parts for index in (part, part + 1))
    found, start = {}, 0
    for name, tensor in tensors.items():
        first, last = max(low, start) - start, min(high, start + tensor.nbytes) - start
        if first < last:
            content = flat_bytes(tensor)[first:last].cpu()
            found[name] = xxhash.xxh3_128_hexdigest(memoryview(content.numpy()))  # type: ignore[arg-type]
        start += tensor.nbytes
    return found, high - low


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the plain values of an encoded state, by their paths."""
    if isinstance(value, dict):
        if "$tensor" not in value:
            for key, each in value.items():
                yield from _leaves(each, path if key.startswith("$") else f"{path}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}")
    else:
        yield path, json.dumps(value)


def _hash_of(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
