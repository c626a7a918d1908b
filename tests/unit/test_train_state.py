"""Training state as JSON and tensors: whole, for every optimizer, and never a pickle."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_harness.errors import ConfigError
from elastic_harness.train.state import Registry, weights_sha256

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


class Bag:
    """Any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Registry]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    return model, optimizer, Registry(model, {"optimizer": optimizer})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_joiner_with_received_state_goes_on_with_the_same_bits(name: str) -> None:
    model, optimizer, registry = make(name)
    train(model, optimizer, 0, 3)
    skeleton, tensors = registry.capture()
    sent = {n: t.clone() for n, t in tensors.items()}
    joiner, its_optimizer, its_registry = make(name)
    its_registry.restore(json.loads(json.dumps(skeleton)), sent)
    assert weights_sha256(joiner) == weights_sha256(model)
    train(model, optimizer, 3, 6)
    train(joiner, its_optimizer, 3, 6)
    assert weights_sha256(joiner) == weights_sha256(model)
    own, others = registry.capture(), its_registry.capture()
    assert json.dumps(own[0]) == json.dumps(others[0])
    assert all(torch.equal(own[1][n], others[1][n]) for n in own[1])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_any_plain_state_comes_back_as_it_was(state: Any) -> None:
    model = nn.Linear(1, 1)
    source, target = Bag(state), Bag()
    skeleton, tensors = Registry(model, {"bag": source}).capture()
    Registry(model, {"bag": target}).restore(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)
    assert target.state == state and repr(target.state) == repr(state)


@pytest.mark.parametrize("thing", [object(), {1, 2}, b"bytes", nn.Linear(1, 1)])
def test_what_would_need_a_pickle_is_refused_with_its_place(thing: Any) -> None:
    registry = Registry(nn.Linear(1, 1), {"bag": Bag({"deep": [1, thing]})})
    with pytest.raises(ConfigError, match=r"bag\.state\.deep\.1 is a .*without pickle"):
        registry.capture()


def test_state_of_another_program_is_refused_by_name() -> None:
    small, large = Registry(nn.Linear(2, 2), {}), Registry(nn.Linear(2, 3), {})
    with pytest.raises(ConfigError, match=r"model\.weight is \(3, 2\).*but \(2, 2\)"):
        large.restore(*small.capture())
    with pytest.raises(ConfigError, match="lacks \\['ema'\\]"):
        Registry(nn.Linear(2, 2), {"ema": Bag()}).restore(*small.capture())


def test_a_changing_buffer_is_state_though_it_is_not_in_the_state_dict() -> None:
    def module() -> nn.Module:
        made = nn.Module()
        made.register_buffer("cache", torch.zeros(2), persistent=False)
        return made

    source, target = module(), module()
    source.cache.fill_(7)
    Registry(target, {}, {"cache": target.cache}).restore(*Registry(source, {}, {"cache": source.cache}).capture())
    assert torch.equal(target.cache, torch.full((2,), 7.0))


def test_the_hash_of_the_weights_is_what_the_documentation_says() -> None:
    model = nn.Module()
    model.b = nn.Parameter(torch.tensor([[1.5, -2.0]]))
    model.a = model.b  # tied: counted once, under its first name
    model.register_buffer("n", torch.tensor(3))
    model.register_buffer("cache", torch.ones(1), persistent=False)
    expected = hashlib.sha256()
    expected.update(b"a\0float32\x001,2\0" + struct.pack("<2f", 1.5, -2.0))
    expected.update(b"n\0int64\0\0" + struct.pack("<q", 3))
    assert weights_sha256(model) == expected.hexdigest()
