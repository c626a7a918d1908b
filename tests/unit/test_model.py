"""The GPT: causal, reproducible, of the stated size, and able to learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from elastic_harness.gpt.config import ModelConfig
from elastic_harness.gpt.model import GPT

SMALL = ModelConfig(n_layer=2, n_head=2, d_model=32, context_length=16)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_logits_have_a_place_for_every_token() -> None:
    assert GPT(SMALL)(tokens(3, 16)).shape == (3, 16, 256)


def test_no_token_sees_a_later_one() -> None:
    model, idx = GPT(SMALL).eval(), tokens(1, 16)
    changed = idx.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(idx), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_order_of_earlier_tokens_matters() -> None:
    model = GPT(SMALL).eval()
    idx = tokens(1, 16)
    swapped = idx[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(model(idx)[:, -1], model(swapped)[:, -1], atol=1e-7)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = GPT(SMALL, seed=5).state_dict()
    torch.manual_seed(2)
    second, other = GPT(SMALL, seed=5).state_dict(), GPT(SMALL, seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_a_fresh_model_knows_nothing() -> None:
    idx = tokens(4, 17)
    loss = F.cross_entropy(GPT(SMALL)(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # log 256


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_once(tied: bool) -> None:
    config = ModelConfig(n_layer=2, n_head=2, d_model=32, tie_weights=tied)
    model = GPT(config)
    block = 4 * 32 * 32 + 2 * 4 * 32 * 32 + 5 * 32 + 2 * 2 * 32
    assert model.num_parameters() == 2 * block + 2 * 32 + 256 * 32 * (1 if tied else 2)
    assert (model.head.weight is model.embedding.weight) is tied


@pytest.mark.slow
def test_one_batch_can_be_learned_by_heart() -> None:
    model, idx = GPT(SMALL), tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_every_parameter_gets_a_gradient() -> None:
    model = GPT(SMALL)
    model(tokens(2, 16)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_dropout_follows_the_random_state_and_rests_in_evaluation() -> None:
    model, idx = GPT(ModelConfig(n_layer=1, n_head=2, d_model=32, dropout=0.3)), tokens(1, 8)
    torch.manual_seed(0)
    first, second = model(idx), model(idx)
    torch.manual_seed(0)
    assert torch.equal(model(idx), first)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(idx), model(idx))


def test_generation_is_reproducible_and_goes_beyond_the_context() -> None:
    model, prompt = GPT(SMALL).train(), tokens(2, 5)
    first = model.generate(prompt, 30, 0.8, torch.Generator().manual_seed(3))
    again = model.generate(prompt, 30, 0.8, torch.Generator().manual_seed(3))
    other = model.generate(prompt, 30, 0.8, torch.Generator().manual_seed(4))
    assert first.shape == (2, 35)
    assert torch.equal(first[:, :5], prompt)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(model.generate(prompt, 9, 0.0), model.generate(prompt, 9, 0.0))
    assert model.training


def test_it_runs_under_bf16_autocast() -> None:
    model = GPT(SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens(1, 16))
    assert torch.isfinite(logits).all()
    logits.float().mean().backward()
