"""Every sample once an epoch, in one order, whatever the ranks, the resizes and the crashes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import xxhash
from torch.utils.data import DataLoader

from elastic_harness.data import Mixture, ResumableDataset, ResumableLoader, TokenIndexFile, index_builder
from elastic_harness.data.schedule import Schedule, slot_sample_ids
from elastic_harness.data.token_index import write_index
from elastic_harness.errors import ConfigError

S = 8


def make(path: Path, documents: list[list[int]], eot_id: int = 0, kind: str = "made up") -> TokenIndexFile:
    write_index(
        path,
        tokens=(np.array(d, "<u2").tobytes() for d in documents),
        lengths=np.array([len(d) for d in documents], np.uint64),
        keys=np.array([xxhash.xxh3_64_intdigest(bytes(str(d), "ascii")) for d in documents], np.uint64),
        sources=np.zeros(len(documents), np.uint32),
        names=["a"],
        vocab_size=60_000,
        eot_id=eot_id,
        tokenizer={"kind": kind},
    )
    return TokenIndexFile(path)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> TokenIndexFile:
    """103 windows of tokens that are their own positions."""
    return make(tmp_path_factory.mktemp("index") / "i.bin", [list(range(low, low + 92)) for low in range(0, 828, 92)])


def ids_of(dataset: ResumableDataset, count: int | None = None) -> list[int]:
    found = []
    for sample in dataset:
        found.append(sample["sample_id"])
        if len(found) == count:
            break
    return found


def test_a_sample_is_a_window_and_the_next_token(index: TokenIndexFile) -> None:
    for sample in ResumableDataset(index, S, seed=3, epochs=1):
        start = sample["sample_id"] * S
        assert sample["input_ids"].tolist() == list(range(start, start + S))
        assert sample["labels"].tolist() == list(range(start + 1, start + S + 1))


def test_samples_as_text(index: TokenIndexFile, tmp_path: Path) -> None:
    """Of two sources, one of which ends its texts within windows."""
    one = make(tmp_path / "one.bin", [[*b"abcde", 256], [*b"fghijklmnop", 256]], 256, "bytes")
    two = make(tmp_path / "two.bin", [list(b"ABCDEFGHIJKLMNOPQ")], 256, "bytes")
    assert ResumableDataset(one, S).texts([1, 0]) == ["hijklmno", "abcdefg"]
    mixture = Mixture({"one": str(one.path), "two": str(two.path)}, {"one": 1.0, "two": 1.0})
    dataset = ResumableDataset(mixture=mixture, seq_length=S)
    assert dataset.texts([3, 0, 2]) == ["IJKLMNOP", "abcdefg", "ABCDEFGH"] and dataset.texts([]) == []
    with pytest.raises(ConfigError, match="tokenizer of kind 'made up'"):
        ResumableDataset(index, S).texts([0])


def test_an_epoch_has_every_sample_once_and_the_next_another_order(index: TokenIndexFile) -> None:
    dataset = ResumableDataset(index, S, seed=3)
    n = len(dataset)
    ids = [*ids_of(dataset), *ids_of(dataset)]
    assert n == 103 and sorted(ids[:n]) == sorted(ids[n:]) == list(range(n)) and ids[:n] != ids[n:]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 64, 200])
def test_ranks_share_an_epoch_without_rest(index: TokenIndexFile, world: int) -> None:
    alone = ids_of(ResumableDataset(index, S, seed=3, epochs=1))
    shares = [ids_of(ResumableDataset(index, S, seed=3, epochs=1, rank=r, world_size=world)) for r in range(world)]
    together = [shares[p % world][p // world] for p in range(len(alone))]
    assert together == alone and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_padding_and_dropping_are_counted(index: TokenIndexFile) -> None:
    for uneven, each, change in (("pad", 26, 1), ("drop", 25, 3)):
        shares = []
        for rank in range(4):
            dataset = ResumableDataset(index, S, epochs=1, rank=rank, world_size=4, uneven=uneven)  # type: ignore[arg-type]
            assert dataset.uneven_samples == change
            shares.append(ids_of(dataset))
            assert dataset.state_dict()["position"] == 103, "what was left out is passed over"
            assert len(ids_of(dataset)) == 0
        assert [len(s) for s in shares] == [each] * 4
        assert len({i for s in shares for i in s}) == (103 if uneven == "pad" else 100)
    assert ResumableDataset(index, S, rank=0, world_size=4).uneven_samples == 0
    with pytest.raises(ConfigError, match="would leave out all"):
        ResumableDataset(index, S, rank=0, world_size=104, uneven="drop")


def test_the_order_is_that_of_the_harness(index: TokenIndexFile) -> None:
    dataset = ResumableDataset(index, S, seed=11, epochs=1)
    schedule = Schedule(len(dataset), 8)
    steps = range(schedule.reaching(schedule.n_samples))
    slots = [slot_sample_ids(schedule, dataset.order, step, slot, 2) for step in steps for slot in range(4)]
    assert np.concatenate(slots).tolist() == ids_of(dataset)


def test_a_pass_is_what_is_left_of_an_epoch(index: TokenIndexFile) -> None:
    """Also for ranks of which some have no sample at the epoch's tail, and after a break and a resume in mid-epoch."""
    expected = ids_of(ResumableDataset(index, S, seed=3, endless=True), 3 * 103)
    dataset = ResumableDataset(index, S, seed=3)
    assert ids_of(dataset, 40) + ids_of(dataset) == expected[:103]
    assert dataset.state_dict()["position"] == 103
    assert ids_of(dataset, 50) == expected[103:153]
    again = ResumableDataset(index, S, seed=3)
    again.load_state_dict(dataset.state_dict())
    assert ids_of(again) == expected[153:206] and ids_of(again) == expected[206:]
    ranks = [ResumableDataset(index, S, seed=3, rank=r, world_size=4) for r in range(4)]
    for epoch in range(2):
        shares = [ids_of(rank) for rank in ranks]
        assert [shares[p % 4][p // 4] for p in range(103)] == expected[epoch * 103 : epoch * 103 + 103]
        assert {rank.state_dict()["position"] for rank in ranks} == {103 * (epoch + 1)}


def test_epochs_bound_all_passes_together(index: TokenIndexFile) -> None:
    dataset = ResumableDataset(index, S, epochs=2)
    assert [len(ids_of(dataset)) for _ in range(3)] == [103, 103, 0]
    assert [sum(len(b["sample_id"]) for b in ResumableLoader(dataset, 10)) for _ in range(2)] == [0, 0]
    with pytest.raises(ConfigError, match="endless is True and epochs is 2; they exclude each other"):
        ResumableDataset(index, S, epochs=2, endless=True)


def test_a_state_goes_on_at_any_world_size(index: TokenIndexFile) -> None:
    expected = ids_of(ResumableDataset(index, S, seed=3, endless=True), 206)
    first = [ResumableDataset(index, S, seed=3, rank=r, world_size=3) for r in range(3)]
    seen = [ids_of(d, 20) for d in first]
    states = [d.state_dict() for d in first]
    assert states[0] == states[1] == states[2] and states[0]["position"] == 60
    assert len(json.dumps(states[0])) < 300
    resumed = [ResumableDataset(index, S, seed=3, rank=r, world_size=5) for r in range(5)]
    for dataset in resumed:
        dataset.load_state_dict(json.loads(json.dumps(states[0])))
    assert sorted(i for s in seen for i in s) == sorted(expected[:60])
    rest, after = [ids_of(d) for d in resumed], [ids_of(d) for d in resumed]
    assert [rest[p % 5][p // 5] for p in range(43)] == expected[60:103]
    assert [after[p % 5][p // 5] for p in range(103)] == expected[103:]


def test_another_dataset_s_state_is_refused(index: TokenIndexFile, tmp_path: Path) -> None:
    state = ResumableDataset(index, S, seed=3).state_dict()
    other = make(tmp_path / "o.bin", [list(range(5, 400))])
    for dataset, named in (
        (ResumableDataset(index, S, seed=4), "seed is 3, this dataset's 4"),
        (ResumableDataset(index, 2 * S, seed=3), "seq_length is 8, this dataset's 16"),
        (ResumableDataset(other, S, seed=3), f'corpus is "{index.fingerprint}"'),
        (ResumableDataset(index, S, seed=3, validation_fraction=0.5), 'split is "train/0"'),
    ):
        with pytest.raises(ConfigError, match=named):
            dataset.load_state_dict(state)
    with pytest.raises(ConfigError, match="order is"):
        ResumableDataset(index, S, seed=3).load_state_dict({**state, "order": "other"})
    with pytest.raises(ConfigError, match="version None"):
        ResumableDataset(index, S, seed=3).load_state_dict({})


def test_a_plain_loader_s_position_is_what_it_gave(index: TokenIndexFile) -> None:
    dataset = ResumableDataset(index, S, seed=3)
    expected = ids_of(ResumableDataset(index, S, seed=3), 60)
    batches = iter(DataLoader(dataset, batch_size=5))
    seen = [i for _ in range(4) for i in next(batches)["sample_id"].tolist()]
    assert seen == expected[:20] and dataset.state_dict()["position"] == 20


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_that_reads_ahead_counts_what_it_gave(index: TokenIndexFile, workers: int) -> None:
    expected = ids_of(ResumableDataset(index, S, seed=3, endless=True), 206)
    dataset = ResumableDataset(index, S, seed=3, endless=True)
    loader = ResumableLoader(dataset, batch_size=7, num_workers=workers)
    batches = iter(loader)
    seen = [i for _ in range(6) for i in next(batches)["sample_id"].tolist()]
    assert seen == expected[:42] and loader.state_dict()["position"] == 42
    del batches
    persistent = {"persistent_workers": True} if workers else {}
    again = ResumableLoader(ResumableDataset(index, S, seed=3), batch_size=7, num_workers=workers, **persistent)
    again.load_state_dict(loader.state_dict())
    passes = [[b["sample_id"].tolist() for b in again] for _ in range(2)]
    assert [i for batch in passes[0] for i in batch] == expected[42:103]
    assert len(passes[0][-1]) == 61 % 7, "the end of an epoch is short, not padded"
    assert [i for batch in passes[1] for i in batch] == expected[103:], "workers that stay begin where the pass does"


@pytest.mark.slow
def test_worker_processes_of_a_plain_loader_are_refused(index: TokenIndexFile) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="ResumableLoader"):
            next(iter(DataLoader(ResumableDataset(index, S), batch_size=2, num_workers=1)))


def test_the_split_is_by_document_and_stays_when_data_is_added(tmp_path: Path) -> None:
    documents = [[1000 + d] * 30 for d in range(200)]
    small = make(tmp_path / "small.bin", documents)
    large = make(tmp_path / "large.bin", [[5] * 30, *documents[:90], [7] * 40, *documents[90:]])

    def held_out(index: TokenIndexFile) -> set[int]:
        windows = ResumableDataset(index, S, split="validation", validation_fraction=0.2, epochs=1)
        return {int(t) for s in windows for t in s["input_ids"]}

    validation = held_out(small)
    assert 15 < len(validation) < 65
    assert validation == held_out(large) - {5, 7}
    train = {int(t) for s in ResumableDataset(small, S, validation_fraction=0.2, epochs=1) for t in s["input_ids"]}
    assert not train & validation and len(train | validation) >= 199
    batch = ResumableDataset(small, S, validation_fraction=0.2).validation_batch(0, 4)
    assert {int(t) for t in batch["input_ids"].flatten()} <= validation


def test_windows_across_what_is_held_out_read_what_belongs(tmp_path: Path) -> None:
    """Against the plainest code: the tokens of the training documents one after another, cut at stride S."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, 9999, rng.integers(1, 40)).tolist() for _ in range(100)]
    index = make(tmp_path / "i.bin", documents)
    limit = int(0.4 * 2.0**64)
    stream = [t for d, key in zip(documents, index.keys.tolist(), strict=True) if key >= limit for t in d]
    dataset = ResumableDataset(index, S, validation_fraction=0.4)
    assert len(dataset) == (len(stream) - S - 1) // S + 1
    batch = dataset.read(np.arange(len(dataset)))
    assert batch["input_ids"].tolist() == [stream[i * S : i * S + S] for i in range(len(dataset))]


def test_what_cannot_be_read(index: TokenIndexFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        ResumableDataset()
    with pytest.raises(ConfigError, match="0 <= rank"):
        ResumableDataset(index, S, rank=2, world_size=2)
    with pytest.raises(ConfigError, match="'exact', 'pad' or 'drop'"):
        ResumableDataset(index, S, uneven="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs seq_length \\+ 1 = 1001"):
        ResumableDataset(index, 1000)
    with pytest.raises(IndexError, match="0 … 102"):
        ResumableDataset(index, S).read([103])


def test_text_is_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("some text to read " * 20)
    first = ResumableDataset(data_files=str(tmp_path / "a.txt"), seq_length=S)
    changed = first.index.path.stat().st_mtime_ns
    again = ResumableDataset(data_files=[str(tmp_path / "*.txt")], seq_length=S)
    assert again.index.path == first.index.path and first.index.path.stat().st_mtime_ns == changed
    (tmp_path / "a.txt").write_text("another text " * 20)
    assert ResumableDataset(data_files=str(tmp_path / "a.txt"), seq_length=S).index.path != first.index.path


def test_an_index_with_its_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.jsonl"
    first.write_text("some text to read " * 20)
    second.write_text('{"text": "hello, hello, hello"}\n{"text": "and more"}\n')
    files, path = [str(first), str(second)], tmp_path / "index.bin"
    index_builder.build(files, path, tokenizer="bytes")
    for index in (path, TokenIndexFile(path)):
        both = ResumableDataset(data_files=files, index_file=index, tokenizer="bytes", seq_length=S)
        assert both.fingerprint() == ResumableDataset(index_file=path, seq_length=S).fingerprint()
    assert both.total_tokens == 20 * 18 + 1 + 19 + 1 + 8 + 1
    with pytest.raises(ConfigError, match=r"built from a.txt, b.jsonl, not from a.txt\b"):
        ResumableDataset(data_files=files[:1], index_file=path, seq_length=S)
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.add_special_tokens(["<|endoftext|>"])
    with pytest.raises(ConfigError, match="its tokenizer is"):
        ResumableDataset(data_files=files, index_file=path, tokenizer=other, seq_length=S)
    second.write_text('{"text": "another text"}\n')
    with pytest.raises(ConfigError, match=r"the first text of .*b.jsonl is another one"):
        ResumableDataset(data_files=files, index_file=path, seq_length=S)


def test_set_epoch_keeps_a_position_within_the_epoch(index: TokenIndexFile) -> None:
    dataset = ResumableDataset(index, S)
    dataset.go_to(len(dataset) + 7)
    dataset.set_epoch(1)
    assert dataset.position == len(dataset) + 7
    for epoch in (3, 0):
        dataset.set_epoch(epoch)
        assert dataset.position == epoch * len(dataset)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="at least 0"):
            dataset.set_epoch(wrong)  # type: ignore[arg-type]


class Virtual:
    """An index of any size: each token is a function of its place."""

    path, fingerprint, remote, packing, eot_id, vocab_size = "virtual", "0" * 32, False, None, 0, 50_000
    tokenizer = {"kind": "virtual"}
    documents = keys = np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return 10**12 * S + 1

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        return ((starts[:, None] + np.arange(length)) % 50_000).astype(np.uint16)

    def prefetch(self, starts: np.ndarray, length: int) -> None: ...


def test_a_trillion_samples_resume_in_the_middle() -> None:
    first = ResumableDataset(Virtual(), S, seed=1)
    assert len(first) == 10**12
    state = {**first.state_dict(), "position": 10**12 // 2}
    seen = []
    for world in (1, 3):
        ranks = [ResumableDataset(Virtual(), S, seed=1, rank=r, world_size=world) for r in range(world)]
        for rank in ranks:
            rank.load_state_dict(state)
        shares = [ids_of(rank, 30 // world) for rank in ranks]
        seen.append([shares[p % world][p // world] for p in range(30)])
    assert seen[0] == seen[1] and len(set(seen[0])) == 30 and max(seen[0]) > 10**11
    sample = next(iter(ranks[0]))
    assert sample["input_ids"][0] == sample["sample_id"] * S % 50_000
    end = {**state, "position": 10**12 - 2}
    last = ResumableDataset(Virtual(), S, seed=1, endless=True)
    last.load_state_dict(end)
    assert len(set(ids_of(last, 4))) == 4 and last.state_dict()["position"] == 10**12 + 2
