"""The learning rate follows the batch, beside every scheduler of torch, and comes back to the bit."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler

from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.scaling import LRScalingManager, ScalingConfig, ScalingRule
from elastic_harness.scaling.rules import WarmUp

BASE_LR = 0.1
Make = Callable[[torch.optim.Optimizer], Any]


def config(**settings: Any) -> ScalingConfig:
    return ScalingConfig(**{"base_lr": BASE_LR, "base_batch_size": 8, "base_world_size": 4, **settings})


class Observed(torch.optim.SGD):
    """Notes the rates with which it steps."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.used: list[list[float]] = []
        self.fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.used.append([float(group["lr"]) for group in self.param_groups])
        if self.fails:
            raise RuntimeError("out of memory")


def observed(lr: Any = BASE_LR, *, others: tuple[Any, ...] = ()) -> Observed:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": each} for each in (lr, *others)]
    return Observed(groups, momentum=0.9)


def test_a_rule_is_a_function_of_the_batch() -> None:
    assert config().factor(64) == 2.0
    assert config(scaling_rule=ScalingRule.SQRT).factor(64) == math.sqrt(2)
    assert config(scaling_rule=ScalingRule.NONE).factor(64) == 1.0
    assert config(scaling_rule=lambda ratio: ratio**0.25).factor(16 * 32) == 2.0


def test_the_rate_goes_gradually_to_its_end_and_stays_there() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-4)
    manager = LRScalingManager(
        ScalingConfig(base_lr=1e-4, base_batch_size=8, base_world_size=4, warmup_steps=100), optimizer
    )
    assert manager.on_topology_change(new_world_size=2) == 5e-5
    assert manager.get_last_lr() == [1e-4]
    rates = [manager.step_warmup() for _ in range(101)]
    assert rates == sorted(rates, reverse=True) and rates[49] == pytest.approx(7.5e-5)
    assert rates[99] == rates[100] == 5e-5 and manager.get_last_lr() == [5e-5]


@given(
    st.sampled_from(list(ScalingRule)),
    st.integers(0, 7),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6),
)
def test_back_at_the_base_it_is_the_base_rate_to_the_bit(
    rule: ScalingRule, warmup_steps: int, changes: list[tuple[int, int]]
) -> None:
    optimizer = observed()
    manager = LRScalingManager(config(scaling_rule=rule, warmup_steps=warmup_steps), optimizer)
    for world_size, steps in changes:
        before = manager.factor
        assert manager.on_topology_change(world_size) == BASE_LR * manager.config.factor(8 * world_size)
        if warmup_steps:
            assert manager.factor == before  # it goes on from where it was, without a jump
        for _ in range(steps):
            manager.step_warmup()
    assert manager.on_topology_change(4) == BASE_LR
    for _ in range(warmup_steps):
        manager.step_warmup()
    optimizer.step()
    assert manager.factor == 1.0 and optimizer.used == [[BASE_LR]]


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 20))
def test_a_warm_up_stays_between_its_ends(start: float, end: float, steps: int) -> None:
    way = [WarmUp(start, end, steps)]
    while not way[-1].is_over:
        way.append(way[-1].stepped())
    factors = [each.factor for each in way]
    assert len(way) == steps + 1 and factors[0] == start and factors[-1] == end
    assert factors == sorted(factors, reverse=start > end) or max(factors) - min(factors) < 1e-12


def test_the_same_topology_again_does_not_begin_the_warm_up_anew() -> None:
    manager = LRScalingManager(config(warmup_steps=4), observed())
    manager.on_topology_change(8)
    manager.step_warmup()
    manager.on_topology_change(8)
    assert manager.factor == 1.25


def test_a_batch_that_does_not_follow_the_workers_is_given() -> None:
    manager = LRScalingManager(config(), observed())
    assert manager.on_topology_change(2, global_batch_size=32) == BASE_LR  # kept by accumulation
    assert manager.on_topology_change(3, global_batch_size=24) == BASE_LR * 0.75


# Schedulers. Each makes one for an optimizer whose groups begin with a rate of 0.1.

Opt = torch.optim.Optimizer


def sequential(o: Opt) -> LRScheduler:
    warm_up = torch_schedulers.LinearLR(o, 0.1, total_iters=3)
    return torch_schedulers.SequentialLR(o, [warm_up, torch_schedulers.CosineAnnealingLR(o, 9)], milestones=[3])


def chained(o: Opt) -> Any:
    return torch_schedulers.ChainedScheduler(
        [torch_schedulers.ConstantLR(o, 0.1, total_iters=3), torch_schedulers.ExponentialLR(o, 0.9)]
    )


SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: torch_schedulers.LambdaLR(o, lambda step: 0.95**step),
    "MultiplicativeLR": lambda o: torch_schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: torch_schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: torch_schedulers.MultiStepLR(o, [2, 6], 0.5),
    "ConstantLR": lambda o: torch_schedulers.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: torch_schedulers.LinearLR(o, 0.25, total_iters=5),
    "ExponentialLR": lambda o: torch_schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda o: torch_schedulers.CosineAnnealingLR(o, 7, eta_min=0.01),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: torch_schedulers.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: torch_schedulers.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: torch_schedulers.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "PolynomialLR": lambda o: torch_schedulers.PolynomialLR(o, 20, 2.0),
}
WORLDS = [4, 4, 2, 2, 2, 8, 8, 4, 4, 1, 3, 4, 4]  # of each step


def steps(optimizer: Observed, scheduler: Any, manager: LRScalingManager | None, worlds: list[int]) -> list[float]:
    """Do one step on so many workers each; the factors."""
    factors = []
    for world in worlds:
        if manager is not None:
            manager.on_topology_change(world)
            factors.append(manager.factor)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, torch_schedulers.ReduceLROnPlateau) else []))
        if manager is not None:
            manager.step_warmup()
    return factors


def test_all_of_torchs_schedulers_are_tried() -> None:
    assert {*SCHEDULERS} == {*torch_schedulers.__all__} - {"LRScheduler"}


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("manager_first", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_the_scheduler_says_is_scaled_and_never_compounded(name: str, manager_first: bool, tensor: bool) -> None:
    def lr() -> Any:
        return torch.tensor(BASE_LR, dtype=torch.float64) if tensor else BASE_LR

    plain = observed(lr(), others=(0.1,))
    steps(plain, SCHEDULERS[name](plain), None, WORLDS)
    optimizer = observed(lr(), others=(0.1,))
    if manager_first:
        manager = LRScalingManager(config(warmup_steps=2), optimizer)
        scheduler = SCHEDULERS[name](optimizer)
    else:
        scheduler = SCHEDULERS[name](optimizer)
        manager = LRScalingManager(config(warmup_steps=2), optimizer)
    factors = steps(optimizer, scheduler, manager, WORLDS)
    assert len({*factors}) > 4
    assert optimizer.used == [[r * f for r in rates] for rates, f in zip(plain.used, factors, strict=True)]
    assert [float(g["lr"]) for g in optimizer.param_groups] == [float(g["lr"]) for g in plain.param_groups]
    assert [float(each) for each in scheduler.get_last_lr()] == [float(g["lr"]) for g in plain.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_new_process_with_other_workers_goes_on_beside_the_scheduler(name: str) -> None:
    plain = observed()
    steps(plain, SCHEDULERS[name](plain), None, [4] * 8)

    first = observed()
    scheduler, manager = SCHEDULERS[name](first), LRScalingManager(config(warmup_steps=3), first)
    steps(first, scheduler, manager, [2, 2, 2, 2])
    saved = copy.deepcopy([first.state_dict(), scheduler.state_dict(), manager.state_dict()])

    second = observed()
    scheduler, manager = SCHEDULERS[name](second), LRScalingManager(config(warmup_steps=3), second)
    for each, state in zip((second, scheduler, manager), saved, strict=True):
        each.load_state_dict(state)
    factors = steps(second, scheduler, manager, [8, 8, 8, 8])
    assert factors == [0.5, 1.0, 1.5, 2.0]
    assert second.used == [[r * f for r in rates] for rates, f in zip(plain.used[4:], factors, strict=True)]


# Optimizers.


def test_groups_keep_their_proportions_and_a_rate_of_zero_stays() -> None:
    optimizer = observed(BASE_LR, others=(0.01, 0.0))
    LRScalingManager(config(), optimizer).on_topology_change(2)
    optimizer.step()
    assert optimizer.used == [[0.05, 0.005, 0.0]]
    assert [group["lr"] for group in optimizer.param_groups] == [BASE_LR, 0.01, 0.0]


def test_groups_that_share_one_tensor_are_scaled_once() -> None:
    shared = torch.tensor(BASE_LR)
    optimizer = observed(shared, others=(shared,))
    LRScalingManager(config(), optimizer).on_topology_change(2)
    optimizer.step()
    assert optimizer.used == [[pytest.approx(0.05)] * 2]
    assert all(group["lr"] is shared for group in optimizer.param_groups) and shared == torch.tensor(BASE_LR)


def updated(lr: Any, world_size: int, device: str = "cpu", **settings: Any) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 7, device=device))
    optimizer = torch.optim.AdamW([weight], lr=lr, **settings)
    LRScalingManager(config(base_lr=float(lr)), optimizer).on_topology_change(world_size)
    for number in range(3):
        weight.grad = torch.sin(weight.detach() * (number + 1))
        optimizer.step()
    return weight.detach()


KINDS = [(BASE_LR, {}), (BASE_LR, {"foreach": True}), (BASE_LR, {"fused": True})]
KINDS += [(torch.tensor(BASE_LR), {}), (torch.tensor(BASE_LR), {"fused": True})]


@pytest.mark.parametrize(("lr", "settings"), KINDS, ids=str)
def test_an_update_is_that_of_the_scaled_rate(lr: Any, settings: dict[str, Any]) -> None:
    assert torch.equal(updated(lr, 2, **settings), updated(lr * 0.5, 4, **settings))
    assert not torch.equal(updated(lr, 2, **settings), updated(lr, 4, **settings))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rate_on_a_gpu_is_scaled() -> None:
    lr = torch.tensor(BASE_LR, device="cuda")
    assert torch.equal(updated(lr, 2, "cuda", capturable=True), updated(lr * 0.5, 4, "cuda", capturable=True))


def test_a_step_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = observed()
    LRScalingManager(config(), optimizer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserCodeError, match="keep today's learning rate for ever"):
        optimizer.step()
    assert optimizer.used == []


def test_at_the_base_nothing_is_touched() -> None:
    optimizer = observed(rate := torch.tensor(BASE_LR))
    LRScalingManager(config(), optimizer)
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    seen: list[Any] = []
    optimizer.step()
    assert seen[0] is rate and rate._version == 0


def test_a_step_inside_a_step_is_scaled_once() -> None:
    """If the class above was used, its step has hooks of its own."""
    observed().step()

    class Centred(Observed):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    optimizer = Centred([torch.nn.Parameter(torch.ones(2))], lr=BASE_LR)
    LRScalingManager(config(), optimizer).on_topology_change(2)
    optimizer.step()
    assert optimizer.used == [[0.05]] and optimizer.param_groups[0]["lr"] == BASE_LR


def test_a_grad_scaler_that_skips_a_step_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Observed([weight], lr=BASE_LR)
    LRScalingManager(config(), optimizer).on_topology_change(2)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.used == [[0.05]] and optimizer.param_groups[0]["lr"] == BASE_LR


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch has some of its own here
def test_a_compiled_step_is_scaled() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=BASE_LR)
    manager = LRScalingManager(config(), optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    moved = []
    for world_size in (4, 2, 8, 4):
        manager.on_topology_change(world_size)
        before, weight.grad = weight.detach().clone(), torch.ones(2)
        step()
        moved.append(round(float(before[0] - weight[0]), 6))
    assert moved == [0.1, 0.05, 0.2, 0.1]


# A step that raises.


def failed(lr: Any = BASE_LR) -> tuple[Observed, LRScalingManager]:
    optimizer = observed(lr)
    manager = LRScalingManager(config(), optimizer)
    manager.on_topology_change(2)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.fails = False
    return optimizer, manager


def test_after_a_step_that_raised_the_next_one_is_scaled_once() -> None:
    optimizer, _ = failed()
    optimizer.step()
    assert optimizer.used == [[0.05], [0.05]] and optimizer.param_groups[0]["lr"] == BASE_LR


def test_an_emergency_checkpoint_after_a_step_that_raised_has_the_unscaled_rate() -> None:
    optimizer, _ = failed()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == BASE_LR


def test_who_catches_what_a_step_raised_puts_the_rate_back() -> None:
    optimizer, manager = failed()
    manager.restore()
    assert optimizer.param_groups[0]["lr"] == BASE_LR


def test_loading_a_state_after_a_step_that_raised() -> None:
    optimizer, _ = failed()
    optimizer.load_state_dict(observed(0.3).state_dict())
    optimizer.step()
    assert optimizer.used[-1] == [0.15] and optimizer.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("lr", [BASE_LR, torch.tensor(BASE_LR)], ids=["float", "tensor"])
def test_a_scheduler_that_compounds_after_a_step_that_raised_is_noticed(lr: Any) -> None:
    optimizer, _ = failed(lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: the scheduler steps before the optimizer
        torch_schedulers.ExponentialLR(optimizer, 0.9).step()
    with pytest.raises(UserCodeError, match=r"group 0 was changed to 0\.04.*restore\(\)"):
        optimizer.step()


def test_an_optimizer_that_changes_its_rate_in_a_step_is_noticed() -> None:
    class Decaying(Observed):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["lr"] *= 0.9

    optimizer = Decaying([torch.nn.Parameter(torch.ones(2))], lr=BASE_LR)
    LRScalingManager(config(), optimizer).on_topology_change(2)
    with pytest.raises(UserCodeError, match=r"If the optimizer does it in step\(\)"):
        optimizer.step()


# State.


def resumed(state: dict[str, Any], **settings: Any) -> LRScalingManager:
    manager = LRScalingManager(config(**{"warmup_steps": 4, **settings}), observed())
    manager.load_state_dict(json.loads(json.dumps(state)))
    return manager


def half_way() -> LRScalingManager:
    manager = LRScalingManager(config(warmup_steps=4), observed())
    manager.on_topology_change(8)
    manager.step_warmup()
    manager.step_warmup()
    return manager


def test_a_warm_up_goes_on_where_it_was_saved() -> None:
    manager = resumed(half_way().state_dict())
    assert [manager.factor, manager.step_warmup(), manager.step_warmup()] == [1.5, BASE_LR * 1.75, BASE_LR * 2]
    assert manager.state_dict()["warm_up"] == [1.0, 2.0, 4, 4]


@settings(max_examples=30)
@given(st.booleans(), st.integers(1, 9))
def test_the_topology_may_be_told_before_or_after_loading(before: bool, world_size: int) -> None:
    manager = LRScalingManager(config(warmup_steps=4), observed())
    if before:
        manager.on_topology_change(world_size)
    manager.load_state_dict(half_way().state_dict())
    if not before:
        manager.on_topology_change(world_size)
    assert manager.factor == 1.5  # of the training that goes on
    for _ in range(4):
        manager.step_warmup()
    assert manager.factor == world_size / 4


def test_another_rule_after_loading_is_gone_to_from_the_saved_rate() -> None:
    manager = resumed(half_way().state_dict(), scaling_rule=ScalingRule.SQRT)
    assert manager.factor == 1.5
    for _ in range(4):
        manager.step_warmup()
    assert manager.factor == math.sqrt(2)


def test_a_state_of_another_base_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'base_world_size': 4.*'base_world_size': 2.*leave load_state_dict out"):
        resumed(half_way().state_dict(), base_world_size=2)


@pytest.mark.parametrize("state", [{}, {"base": 3}, {"base": {}, "global_batch_size": 1, "warm_up": [1, 2, 3, 4, 5]}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no state of an LRScalingManager"):
        resumed(state)


# Wrong input.


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_lr": 0}, r"scaling\.base_lr is 0\.0, but must be greater than 0"),
        ({"base_batch_size": 0}, r"scaling\.base_batch_size is 0, but must be at least 1"),
        ({"base_world_size": 2.5}, r"scaling\.base_world_size is 2\.5, but must be a whole number"),
        ({"warmup_steps": -1}, r"scaling\.warmup_steps is -1, but must be at least 0"),
        ({"scaling_rule": "cubic"}, r"scaling_rule is 'cubic', but must be .*ScalingRule\.SQRT.* or a function"),
        ({"scaling_rule": lambda ratio: 2 * ratio}, r"gives 2\.0 for the ratio 1\.0, but must give exactly 1"),
        ({"scaling_rule": lambda ratio: None}, r"gives None for the ratio 1\.0, but must give a positive number"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**settings)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf, "2", None])
def test_a_function_that_gives_no_factor_is_refused_and_the_rate_stays(factor: Any) -> None:
    optimizer = observed()
    manager = LRScalingManager(config(scaling_rule=lambda ratio: 1.0 if ratio == 1 else factor), optimizer)
    with pytest.raises(ConfigError, match=r"for the ratio 0\.5, but must give a positive number"):
        manager.on_topology_change(2)
    optimizer.step()
    assert optimizer.used == [[BASE_LR]]


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, None, "2"])
def test_a_wrong_number_of_workers_is_refused(world_size: Any) -> None:
    manager = LRScalingManager(config(), observed())
    with pytest.raises(ConfigError, match=f"new_world_size is {world_size!r}"):
        manager.on_topology_change(world_size)
    with pytest.raises(ConfigError, match="global_batch_size is 0"):
        manager.on_topology_change(2, global_batch_size=0)


def test_an_optimizer_with_another_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_lr is 0\.1, but the optimizer's rates are \[0\.3\]"):
        LRScalingManager(config(), observed(0.3))


def test_a_second_manager_is_refused_until_the_first_is_removed() -> None:
    optimizer = observed()
    first = LRScalingManager(config(), optimizer)
    first.on_topology_change(2)
    with pytest.raises(ConfigError, match=r"call its remove\(\)"):
        LRScalingManager(config(), optimizer)
    first.remove()
    optimizer.step()
    LRScalingManager(config(), optimizer).on_topology_change(2)
    optimizer.step()
    assert optimizer.used == [[BASE_LR], [0.05]]


def test_what_is_no_optimizer_is_refused() -> None:
    class Wrapper(torch.optim.Optimizer):  # as accelerate has one
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

    for other in (torch.nn.Linear(1, 1), Wrapper(observed())):
        with pytest.raises(ConfigError, match="give the optimizer that it wraps"):
            LRScalingManager(config(), other)  # type: ignore[arg-type]


def test_an_optimizer_that_chooses_its_own_rate_is_refused() -> None:
    optimizer = observed()
    optimizer.param_groups[0]["lr"] = None  # as Adafactor of transformers
    with pytest.raises(ConfigError, match=r"group 0 of Observed has lr=None"):
        LRScalingManager(config(), optimizer)


def test_a_forgotten_step_warmup_is_told_once() -> None:
    optimizer = observed()
    manager = LRScalingManager(config(warmup_steps=3), optimizer)
    manager.on_topology_change(2)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"step_warmup\(\) .* was not called"):
        optimizer.step()
    optimizer.step()
