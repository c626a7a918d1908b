"""Windows that respect documents: separate ones and packed ones, against the plainest code."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.commands.index import main as index_command
from elastic_harness.data import ResumableDataset, TokenIndexFile, cu_seqlens
from elastic_harness.data.packing import best_fit, pack
from elastic_harness.data.windows import NO_LABEL
from elastic_harness.errors import ConfigError
from elastic_harness.gpt.config import ModelConfig
from elastic_harness.gpt.model import GPT
from unit.test_dataset import S, make


def made_up(path: Path, seed: int, longest: int, count: int = 80) -> tuple[TokenIndexFile, list[list[int]]]:
    """Documents whose tokens are all different, each ending with 0."""
    draw, token, documents = np.random.default_rng(seed), 1, []
    for _ in range(count):
        length = int(draw.integers(1, longest))
        documents.append([*range(token, token + length), 0])
        token += length
    return make(path, documents), documents


@pytest.mark.parametrize("fraction", [0.0, 0.3])
@pytest.mark.parametrize("longest", [3, 9, 40])
def test_separate_windows_say_where_documents_begin(tmp_path: Path, longest: int, fraction: float) -> None:
    index, documents = made_up(tmp_path / "i.bin", 1, longest)
    dataset = ResumableDataset(index, S, documents="separate", validation_fraction=fraction)
    plain = ResumableDataset(index, S, validation_fraction=fraction)
    keys = np.asarray(index.keys)
    mine = [d for d, key in zip(documents, keys.tolist(), strict=True) if key >= int(fraction * 2.0**64)]
    owner = np.concatenate([np.full(len(d), n) for n, d in enumerate(mine)])
    batch, joined = dataset.read(np.arange(len(dataset))), plain.read(np.arange(len(plain)))
    assert torch.equal(batch["input_ids"], joined["input_ids"])
    for row in range(len(dataset)):
        owners = owner[row * S : row * S + S + 1]
        same = torch.from_numpy(owners[1:] == owners[:-1])
        assert torch.equal(batch["labels"][row], torch.where(same, joined["labels"][row], NO_LABEL))
        assert batch["document_ids"][row].tolist() == np.unique(owners[:-1], return_inverse=True)[1].tolist()


def test_cu_seqlens_are_the_bounds_of_documents() -> None:
    bounds, longest = cu_seqlens(torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2]]))
    assert bounds.tolist() == [0, 2, 4, 8, 9, 10, 12] and bounds.dtype == torch.int32 and longest == 4


@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_fills_no_bin_beyond_its_capacity_and_wastes_less_than_a_bin_on_average(lengths: list[int]) -> None:
    pieces = np.array(lengths, np.int64)
    bins = best_fit(pieces, 50)
    used = np.bincount(bins, weights=pieces) if len(bins) else np.zeros(0)
    assert (used <= 50).all() and (used > 0).all()
    # Two bins that are half empty would have been one.
    assert np.count_nonzero(used <= 25) <= 1
    # Best-fit decreasing needs at most 11/9 of the best possible, and one more (Johnson 1973).
    assert len(used) <= 11 / 9 * max(1, -(-sum(lengths) // 50) * 2) + 1


def test_best_fit_takes_the_fullest_that_has_room() -> None:
    assert best_fit(np.array([6, 5, 4, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1]
    assert best_fit(np.array([10, 10]), 10).tolist() == [0, 1]


@pytest.mark.parametrize("fraction", [0.0, 0.4])
@pytest.mark.parametrize("longest", [4, 9, 60])
def test_packed_windows_have_every_label_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], longest: int, fraction: float
) -> None:
    index, documents = made_up(tmp_path / "i.bin", 2, longest)
    options = ["--seq-length", str(S), "--validation-fraction", str(fraction)]
    assert index_command(["pack", str(index.path), "-o", str(tmp_path / "p.bin"), *options]) == 0
    assert "filled" in capsys.readouterr().out
    packed = TokenIndexFile(tmp_path / "p.bin", verify=True)
    assert packed.fingerprint != index.fingerprint
    limit, keys = int(fraction * 2.0**64), np.asarray(index.keys).tolist()
    for split, mine in (
        ("train", [d for d, key in zip(documents, keys, strict=True) if key >= limit]),
        ("validation", [d for d, key in zip(documents, keys, strict=True) if key < limit]),
    ):
        if not mine:
            continue
        dataset = ResumableDataset(packed, S, documents="pack", split=split, validation_fraction=fraction)  # type: ignore[arg-type]
        batch = dataset.read(np.arange(len(dataset)))
        pairs = set()
        for tokens, labels, ids in zip(
            *(batch[n].tolist() for n in ("input_ids", "labels", "document_ids")), strict=True
        ):
            assert ids == sorted(ids) and ids[0] == 0
            for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
                if label == NO_LABEL:
                    assert token == 0 and ids[place] == ids[-1]
                    continue
                assert (token, label) not in pairs
                pairs.add((token, label))
                if place + 1 < S and ids[place + 1] == ids[place]:
                    assert tokens[place + 1] == label
        assert pairs == {pair for d in mine for pair in pairwise(d)}


def test_packing_is_a_function_of_the_documents_and_fills_windows() -> None:
    lengths = np.random.default_rng(3).integers(2, 700, 20_000)
    documents = np.concatenate([[0], np.cumsum(lengths)])
    keys = np.random.default_rng(4).integers(0, 2**63, 20_000).astype(np.uint64)
    first, second = pack(documents, keys, 512), pack(documents, keys, 512)
    assert np.array_equal(first.bins, second.bins) and np.array_equal(first.starts, second.starts)
    assert first.filled > 0.99


def test_packings_that_are_not_there(tmp_path: Path) -> None:
    index, _ = made_up(tmp_path / "i.bin", 1, 9)
    with pytest.raises(ConfigError, match=r"has no packing.*index pack"):
        ResumableDataset(index, S, documents="pack")
    index_command(["pack", str(index.path), "-o", str(tmp_path / "p.bin"), "--seq-length", "16"])
    with pytest.raises(ConfigError, match="a packing for seq_length=16"):
        ResumableDataset(str(tmp_path / "p.bin"), S, documents="pack")
    with pytest.raises(ConfigError, match="is the input"):
        index_command(["pack", str(index.path), "-o", str(index.path), "--seq-length", "16"])
    with pytest.raises(ConfigError, match="--seq-length is 0"):
        index_command(["pack", str(index.path), "-o", str(tmp_path / "q.bin"), "--seq-length", "0"])
    with pytest.raises(ConfigError, match="'join', 'separate' or 'pack'"):
        ResumableDataset(index, S, documents="some")  # type: ignore[arg-type]


def test_the_model_sees_each_document_alone() -> None:
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=16, context_length=12)).eval()
    tokens = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    together = model(tokens, documents)
    apart = torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], dim=1)
    torch.testing.assert_close(together, apart)
    assert not torch.allclose(model(tokens)[:, 5:], apart[:, 5:])
