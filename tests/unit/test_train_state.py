"""Training state as JSON and tensors: whole, for every optimizer, and never a pickle."""

from __future__ import annotations

import collections
import copy
import enum
import hashlib
import inspect
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic_harness.checkpoint import load_optimizer
from elastic_harness.checkpoint.structure import decode, encode
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.train.buffers import Buffers
from elastic_harness.train.imprint import differences, imprint, state_hash
from elastic_harness.train.refusals import check_state_dict
from elastic_harness.train.state import Registry, weights, weights_sha256

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
    "ASGD": {"t0": 1},
    "Adafactor": {},
    "Muon": {},
}
VARIANTS = [{}, {"foreach": True}, {"fused": True}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class MasterWeights(torch.optim.Optimizer):
    """Momentum on weights that are kept in float32, whatever the parameters are; more in a list, and as numbers."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(master=parameter.float(), moments=[torch.zeros(parameter.shape)], seen=np.float32(0.1))
                state["seen"] = state["seen"] * 1.1
                state["moments"][0].mul_(0.9).add_(parameter.grad.float(), alpha=float(state["seen"]))
                state["master"].sub_(state["moments"][0], alpha=group["lr"])
                parameter.copy_(state["master"])


class Lamb(torch.optim.Optimizer):
    """Scales by a norm of its state: a sum in the order of memory."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros_like(parameter)
            state["average"].lerp_(parameter.grad, 0.1)
            parameter.sub_(state["average"] / state["average"].sum().abs(), alpha=self.param_groups[0]["lr"])


class Bag:
    """Any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).to(dtype)


def train(optimizer: torch.optim.Optimizer, first: int, last: int, scheduler: Any = None) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in optimizer.param_groups[0]["params"]:
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(drawn)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def hand_over(giver: Registry, taker: Registry) -> None:
    """As it goes to a joiner: by way of JSON, and other memory."""
    skeleton, tensors = giver.capture()
    sent = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    given, held = taker.restore(json.loads(json.dumps(skeleton, allow_nan=False)), sent)
    assert given == held == state_hash(imprint(*giver.capture()))


def same(one: Registry, other: Registry) -> bool:
    return imprint(*one.capture()) == imprint(*other.capture())


def goes_on_alike(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer, Any]], *, rehearsed: bool = True) -> None:
    """A joiner that takes over the state after some steps does the next ones with the same bits, in all of it."""
    sides = []
    for _ in range(2):
        model, optimizer, part = make()
        sides.append((Registry(model, {"optimizer": optimizer, **({"part": part} if part else {})}), optimizer, part))
    (giver, *giving), (taker, *taking) = sides
    giver.rehearse()
    train(giving[0], 0, 3, giving[1])
    if rehearsed:
        giver.rehearse()
    hand_over(giver, taker)
    train(giving[0], 3, 7, giving[1])
    train(taking[0], 3, 7, taking[1])
    assert list(differences(imprint(*giver.capture()), imprint(*taker.capture()))) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_joiner_with_received_state_goes_on_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    kind = getattr(torch.optim, name)
    known = inspect.signature(kind).parameters
    for variant in [v for v in VARIANTS if v.keys() <= known.keys()]:

        def make(variant: dict[str, Any] = variant) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
            model = model_of(dtype)
            return model, kind(model.parameters(), **OPTIMIZERS[name], **variant), None

        goes_on_alike(make)


def test_the_table_has_every_optimizer_that_can_be_trained_with() -> None:
    kinds = {n for n, kind in vars(torch.optim).items() if inspect.isclass(kind) and kind is not torch.optim.Optimizer}
    assert kinds - {"LBFGS", "SparseAdam"} == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_optimizers_keep_their_types(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = model_of(dtype)
        return model, MasterWeights(model.parameters()), None

    goes_on_alike(make)


def test_the_order_of_elements_in_memory_is_state() -> None:
    """Sums follow it: without it this optimizer goes on with other bits."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Conv2d(13, 29, 5, bias=False).to(memory_format=torch.channels_last)
        return model, Lamb(model.parameters()), None

    goes_on_alike(make, rehearsed=False)


def schedulers() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    rates = torch.optim.lr_scheduler
    return {
        "StepLR": lambda o: rates.StepLR(o, 2),
        "MultiStepLR": lambda o: rates.MultiStepLR(o, [2, 4]),
        "LambdaLR": lambda o: rates.LambdaLR(o, lambda step: 1 / (1 + step)),
        "MultiplicativeLR": lambda o: rates.MultiplicativeLR(o, lambda step: 0.9),
        "ConstantLR": lambda o: rates.ConstantLR(o, 0.3, 4),
        "LinearLR": lambda o: rates.LinearLR(o, 0.1, total_iters=5),
        "ExponentialLR": lambda o: rates.ExponentialLR(o, 0.9),
        "PolynomialLR": lambda o: rates.PolynomialLR(o, 6, 2.0),
        "CosineAnnealingLR": lambda o: rates.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 2),
        "CyclicLR": lambda o: rates.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
        "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, total_steps=9),
        "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
        "SequentialLR": lambda o: rates.SequentialLR(
            o, [rates.LinearLR(o, 0.1, total_iters=4), rates.MultiStepLR(o, [1, 2])], [4]
        ),
        "ChainedScheduler": lambda o: rates.ChainedScheduler([rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)]),
    }


@pytest.mark.parametrize("name", schedulers())
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["float", "tensor"])
def test_schedulers_go_on_alike(name: str, lr: Any) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = model_of(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=copy.deepcopy(lr), momentum=0.9)
        return model, optimizer, schedulers()[name](optimizer)

    goes_on_alike(make)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("average", ["ema", "swa", "float64"])
def test_averages_and_scalers_survive(average: str, dtype: torch.dtype) -> None:
    def make() -> tuple[AveragedModel, torch.amp.GradScaler, torch.optim.Optimizer, Registry]:
        model = model_of(dtype)
        rules: dict[str, Any] = {
            "swa": {},
            "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
            "float64": {"avg_fn": lambda average, new, count: average + (new - average) / (count + 1)},
        }
        ema = AveragedModel(model, use_buffers=True, **rules[average])
        if average == "float64":
            ema.double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.7, growth_interval=2)
        return ema, scaler, optimizer, Registry(model, {"optimizer": optimizer, "ema": ema, "scaler": scaler})

    def work(ema: AveragedModel, scaler: torch.amp.GradScaler, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            train(optimizer, step, step + 1)
            if dtype != torch.float16:  # whose gradients cannot be unscaled
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
                scaler.update()
            ema.update_parameters(registry.model)

    *giving, registry = make()
    *taking, taker = make()
    registry.rehearse()
    work(*giving, 0, 3)
    registry.rehearse()
    hand_over(registry, taker)
    work(*giving, 3, 6)
    registry, giver = taker, registry
    work(*taking, 3, 6)
    assert same(giver, taker)


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


class Phase(enum.IntEnum):
    WARM = 1


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        -math.nan,
        struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0],
        2**70,
        np.float32(0.1),
        np.float32("nan"),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.str_("name"),
        (1, [2, (3,)]),
        {True: 1, 2: "two"},
        collections.Counter({3: 2}),
        torch.Size([2, 3]),
        torch.tensor([math.nan, -0.0]),
        torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3, 4).t(),
        torch.empty(0, 3),
        torch.tensor(True),
    ],
    ids=repr,
)
def test_a_value_comes_back_to_the_bit_and_of_its_kind(value: Any) -> None:
    def imprinted(value: Any) -> Any:
        tensors: dict[str, Tensor] = {}
        return imprint({"": encode(value, "value", tensors)}, tensors), tensors

    first, tensors = imprinted(value)
    copies = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    back = decode(json.loads(json.dumps(first["skeleton"][""], allow_nan=False)), copies)
    assert type(back) is type(value) and state_hash(imprinted(back)[0]) == state_hash(first)
    if isinstance(value, Tensor):
        assert back.stride() == value.stride()


class Odd(Bag):
    """Does not give back what it was given."""

    def __init__(self, state: Any, change: Callable[[Any], Any]) -> None:
        super().__init__(state)
        self.change = change

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = self.change(state["state"])


@pytest.mark.parametrize(
    ("state", "change", "said"),
    [
        (torch.ones(2, dtype=torch.float64), lambda s: s.float(), "odd.state was float64 (2,) and is float32 (2,)"),
        (torch.ones(2), lambda s: s[:1], "odd.state was float32 (2,) and is float32 (1,)"),
        (torch.zeros(2), lambda s: -s, "odd.state has other values"),
        ([torch.zeros(2)], lambda s: [], "odd.state.0 is gone"),
        ({"step": 3}, lambda s: {"step": 3.0}, "odd.state.step was 3 and is 3.0"),
        ({"step": 0.0}, lambda s: {"step": -0.0}, "odd.state.step was 0.0 and is -0.0"),
        ((1, 2), list, 'odd.state was {"$tuple":[1,2]} and is [1,2]'),
        (np.float32(1), float, "odd.state was {"),
        (Phase.WARM, lambda s: s, "Phase"),
        (collections.defaultdict(int, a=1), lambda s: s, "collections.defaultdict"),
        (torch.zeros(9)[2:5], lambda s: s, "within"),
    ],
)
def test_what_does_not_survive_is_named_before_it_can_do_harm(state: Any, change: Any, said: str) -> None:
    model = nn.Linear(1, 1)
    giver, taker = (Registry(model, {"odd": Odd(state, change)}) for _ in range(2))
    with pytest.raises(ConfigError, match="does not survive") as refused:
        giver.rehearse()
    assert said in str(refused.value)
    with pytest.raises(ConfigError, match="does not survive") as refused:
        hand_over(Registry(model, {"odd": Bag(state)}), taker)
    assert said in str(refused.value)


def test_a_load_that_changes_what_it_was_given_is_seen() -> None:
    """In place: afterwards both sides look the same."""

    def halved(state: Tensor) -> Tensor:
        return state.mul_(0.5)

    with pytest.raises(ConfigError, match=r"odd\.state has other values"):
        Registry(nn.Linear(1, 1), {"odd": Odd(torch.ones(2), halved)}).rehearse()


def test_one_tensor_in_two_places_is_one_after_a_restore_as_well() -> None:
    """A learning rate of two groups, and an average that is a weight: what changes one changes the other."""

    def make() -> tuple[Registry, torch.optim.Optimizer, Bag]:
        model = model_of()
        first, second = model.parameters()
        groups = [{"params": [first]}, {"params": [second]}]
        optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1))
        bag = Bag({"weight": first.detach()})
        return Registry(model, {"optimizer": optimizer, "bag": bag}), optimizer, bag

    giver, optimizer, _ = make()
    giver.rehearse()
    optimizer.param_groups[0]["lr"].fill_(0.3)
    taker, optimizer, bag = make()
    hand_over(giver, taker)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(7)
    assert bag.state["weight"].eq(7).all()


def test_who_holds_a_group_of_the_optimizer_holds_the_loaded_one() -> None:
    optimizer, other = (torch.optim.Adam(model_of().parameters(), lr) for lr in (0.1, 0.2))
    groups, group, state = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    train(other, 0, 2)
    load_optimizer(optimizer, other.state_dict())
    assert optimizer.param_groups is groups and groups[0] is group and group["lr"] == 0.2
    assert optimizer.state is state and len(state) == 2
    assert group["params"][0] in state


def test_state_that_an_older_version_has_written_is_taken() -> None:
    """It says nothing of kinds, layouts or modules' extra state."""
    model = Remembering({"calls": 3})
    bag = Bag({"tally": collections.Counter(a=1)})
    skeleton, tensors = Registry(model, {"bag": bag}).capture()
    old = {"bag": {"state": {"tally": {"a": 1}}}}
    assert skeleton.keys() > old.keys()
    other = Bag()
    Registry(model, {"bag": other}).restore(old, {n: t for n, t in tensors.items() if n.startswith("model.")})
    assert other.state == {"tally": {"a": 1}}


class Remembering(nn.Module):
    """A module with extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"calls": 3, "scale": -0.0}, torch.ones(2, dtype=torch.float64)], ids=type)
def test_extra_state_of_modules_is_handed_over_and_is_no_weight(extra: Any) -> None:
    giver, taker = nn.Sequential(Remembering(extra)), nn.Sequential(Remembering(None))
    check_state_dict(giver)
    Registry(giver, {}).rehearse()
    hand_over(Registry(giver, {}), Registry(taker, {}))
    assert repr(taker[0].extra) == repr(extra)
    assert [name for name, _ in weights(giver)] == ["0.weight"]
    assert weights_sha256(giver) == weights_sha256(nn.Sequential(Remembering(0)))


def test_extra_state_that_needs_a_pickle_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"State module_state\.0 is a object"):
        Registry(nn.Sequential(Remembering(object())), {}).capture()


def test_extra_state_that_changes_in_forward_is_refused() -> None:
    model = nn.Sequential(Remembering({"amax": torch.zeros(2)}))
    buffers = Buffers(model, [], torch.float32)
    buffers.check_unchanged()
    buffers.finish_slot([], counts=True)
    model[0].extra["amax"].neg_()
    with pytest.raises(UserCodeError, match=r"extra state of module 0 .* changed in forward"):
        buffers.finish_slot([], counts=True)


def test_what_only_a_state_dict_hook_knows_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(seen=torch.zeros(1)))
    with pytest.raises(ConfigError, match=r"state_dict\(\) has \['seen'\]"):
        check_state_dict(model)


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
