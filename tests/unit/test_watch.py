"""What the watch over training state looks at: every element once in a round; and batches have memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_harness.errors import UserCodeError
from elastic_harness.train import watch
from elastic_harness.train.batch import ALIGNMENT_BYTES, own_memory
from elastic_harness.train.watch import PIECES_MAX, StateWatch, differences, into_parts


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 300), max_size=30),
    types=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), min_size=30, max_size=30),
    limit=st.integers(8, 400),
)
def test_every_element_is_in_one_part(sizes: Sequence[int], types: Sequence[torch.dtype], limit: int) -> None:
    tensors = [(f"t{i}", torch.zeros(n, dtype=t)) for i, (n, t) in enumerate(zip(sizes, types, strict=False))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "PART_BYTES", limit)
        patch.setattr(watch, "PARTS_MAX", 10**6)
        parts = into_parts(tensors)
    seen = {name: torch.zeros(tensor.numel(), dtype=torch.int64) for name, tensor in tensors}
    for part in parts:
        assert len(part) <= PIECES_MAX
        assert sum((hi - lo) * tensor.element_size() for _, tensor, lo, hi in part) <= limit
        for name, _, lo, hi in part:
            seen[name][lo:hi] += 1
    assert all((count == 1).all() for count in seen.values())


def test_any_bit_of_the_state_is_found_within_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, momentum and buffers, in a model of several parts."""
    monkeypatch.setattr(watch, "PART_BYTES", 4000)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)), nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    held = StateWatch(model, optimizer, [], dict(model.named_buffers()))
    assert held.parts > 10
    state: list[Tensor] = [*model.parameters(), *model.buffers()]
    state += [value for of in optimizer.state.values() for value in of.values()]
    words = [_word(held, version) for version in range(held.parts)]
    for tensor in state:
        before = tensor.detach().clone()
        tensor.data.reshape(-1)[-1:].view(torch.uint8)[0] ^= 1
        changed = [version for version in range(held.parts) if _word(held, version) != words[version]]
        assert len(changed) == 1
        tensor.data.copy_(before)
    assert [_word(held, version) for version in range(held.parts)] == words


def _word(held: StateWatch, version: int) -> int:
    held.accept_state(version)
    return held.checked_word("here")


def test_a_change_that_torch_does_not_count_is_named() -> None:
    model = nn.Linear(4, 2)
    held = StateWatch(model, torch.optim.SGD(model.parameters(), momentum=0.9), [], {})
    model.bias.detach().numpy()[0] += 1
    with pytest.raises(UserCodeError, match="bias was changed in step 3 in a way that torch does not count"):
        held.checked_word("in step 3")


def test_differences_name_the_place() -> None:
    before = {"a": [{"lr": 0.1, "betas": [0.9, 0.95]}], "b": 1}
    after = {"a": [{"lr": 0.2, "betas": [0.9, 0.95]}], "b": 1, "c": [1]}
    assert list(differences(before, after)) == [("a.0.lr", "0.1", "0.2"), ("c", "None", "[1]")]


# ---- batches


class Pair(NamedTuple):
    x: Any
    y: Any


def odd_addresses() -> dict[str, Any]:
    memory = torch.arange(4096, dtype=torch.float32)
    return {
        "offset": memory[1:33].view(4, 8),
        "transposed": memory[3:35].view(4, 8).t(),
        "expanded": memory[5:9].expand(3, 4),
        "strided": memory[7:71].view(8, 8)[:, 2:5],
        "a view of more": memory[:32].view(4, 8),
        "scalar": memory[9],
        "bytes": torch.frombuffer(bytearray(range(40)), dtype=torch.uint8, offset=3),
        "array": np.arange(33, dtype=np.float32)[1:].reshape(4, 8),
    }


@pytest.mark.parametrize("name", odd_addresses())
def test_what_is_elsewhere_is_copied_with_its_strides(name: str) -> None:
    given = odd_addresses()[name]
    got = own_memory(given)
    address = got.ctypes.data if isinstance(got, np.ndarray) else got.data_ptr()
    assert address % ALIGNMENT_BYTES == 0
    assert got.shape == given.shape and got.dtype == given.dtype
    if isinstance(given, Tensor):
        assert got.stride() == given.stride() and torch.equal(got, given)
        assert got.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    else:
        assert (got == given).all() and not np.shares_memory(got, given)


def test_what_is_in_place_is_not_copied() -> None:
    whole, empty, text = torch.randn(4, 8), torch.empty(0, 3)[:, 1:], ["a", "b"]
    batch = own_memory({"x": [whole, (empty, text)], "pair": Pair(whole, 3)})
    assert batch["x"][0] is whole and batch["x"][1][0] is empty and batch["pair"].x is whole
    assert isinstance(batch["pair"], Pair) and batch["x"][1][1] == text
    own = object()
    assert own_memory(own) is own


def test_a_linear_layer_gives_the_same_bits_wherever_its_batch_was() -> None:
    """Shapes for which four addresses in a row give four results on a CPU with AVX-512."""
    torch.manual_seed(0)
    for samples, features, outputs in ((16, 216, 1), (8, 299, 8), (64, 72, 10), (3, 49, 10), (2, 38, 16), (32, 287, 2)):
        layer, content = nn.Linear(features, outputs), torch.randn(samples * features)
        memory = torch.empty(content.numel() + 32)
        results = set()
        for offset in range(16):
            view = memory[offset : offset + content.numel()].copy_(content).view(samples, features)
            layer.zero_grad()
            layer(own_memory(view)).pow(2).sum().backward()
            assert layer.weight.grad is not None
            results.add(layer.weight.grad.numpy().tobytes())
        assert len(results) == 1, features
