"""Order, schedule and text: every sample exactly once an epoch, from arithmetic alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.data import ResumableDataset
from elastic_harness.data.corpus import Corpus, cache_folder
from elastic_harness.data.mapstyle import MapStyle
from elastic_harness.data.order import TINY, EpochOrder, Permutation, epoch_order, order_key
from elastic_harness.data.schedule import Schedule, slot_sample_ids
from elastic_harness.errors import ConfigError, InfrastructureError

FROZEN_TINY = [6, 2, 8, 7, 3, 4, 0, 1, 9, 5]
FROZEN_LARGE = [932340, 680145, 585703, 929647, 71241]

sizes = st.one_of(st.integers(1, 300), st.integers(TINY - 2, TINY + 300), st.sampled_from([65_536, 99_991]))


@settings(max_examples=60)
@given(sizes, st.integers(0, 2**128 - 1))
def test_an_order_is_a_permutation(n: int, key: int) -> None:
    ids = Permutation(n, key)(np.arange(n))
    assert np.array_equal(np.sort(ids), np.arange(n))
    assert ids.dtype == np.int64


@given(st.integers(TINY + 1, 2**40), st.integers(0, 2**64), st.data())
def test_any_position_of_a_large_order_is_computed_alone(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    permutation = Permutation(n, key)
    together = permutation(np.array(positions))
    assert [int(permutation([p])[0]) for p in positions] == together.tolist()
    assert len(set(together.tolist())) == len(positions)
    assert all(0 <= i < n for i in together.tolist())


@pytest.mark.parametrize("n", [100, TINY, TINY + 1, 50_000])
def test_orders_look_random_and_differ_between_seeds_and_epochs(n: int) -> None:
    orders = [epoch_order(n, seed, epoch)(np.arange(n)) for seed in (0, 1) for epoch in (0, 1)]
    orders.append(np.arange(n))
    for i, first in enumerate(orders):
        for second in orders[:i]:
            # Two random orders agree at about one position; their ranks correlate with deviation 1/sqrt(n).
            assert np.count_nonzero(first == second) <= 10
            assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("n", [1000, 100_000])
def test_neighbours_in_the_order_are_no_neighbours_in_the_text(n: int) -> None:
    steps = np.diff(epoch_order(n, 7, 3)(np.arange(n)))
    assert np.count_nonzero(np.abs(steps) == 1) <= 2 + 5 * np.sqrt(2)
    values, counts = np.unique(steps, return_counts=True)
    assert counts.max() <= 12, f"the difference {values[counts.argmax()]} comes up {counts.max()} times"


def test_an_order_never_changes_between_versions() -> None:
    assert epoch_order(10, 1337, 0)(np.arange(10)).tolist() == FROZEN_TINY
    assert epoch_order(1_000_000, 1337, 1)(np.arange(5)).tolist() == FROZEN_LARGE


def test_the_shuffle_of_few_samples_reaches_every_order() -> None:
    seen = {tuple(Permutation(4, order_key(seed, 0))(np.arange(4)).tolist()) for seed in range(400)}
    assert len(seen) == 24


def test_shapes_are_kept_and_positions_are_checked() -> None:
    assert Permutation(10, 1)(np.zeros((2, 3), dtype=np.int64)).shape == (2, 3)
    assert Permutation(10_000, 1)(np.zeros((0,), dtype=np.int64)).shape == (0,)
    with pytest.raises(IndexError, match="10"):
        Permutation(10, 1)([10])
    with pytest.raises(IndexError):
        Permutation(10_000, 1)([-1])
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 1)


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 12), st.integers(1, 3), st.data())
def test_every_sample_is_used_once_an_epoch_whatever_the_resizes(
    n: int, micro: int, slots: int, epochs: int, data: st.DataObject
) -> None:
    """Each step is dealt out to another number of workers; together they read every sample once an epoch."""
    schedule, order = Schedule(n, micro * slots), EpochOrder(n, 5)
    read: list[list[int]] = [[] for _ in range(epochs)]
    for step in range(epochs * schedule.reaching(schedule.n_samples)):
        workers = data.draw(st.integers(1, 5))
        for worker in range(workers):
            for slot in range(worker * slots // workers, (worker + 1) * slots // workers):
                ids = slot_sample_ids(schedule, order, step, slot, micro)
                read[schedule.at(step).epoch].extend(ids.tolist())
    assert all(sorted(ids) == list(range(n)) for ids in read)


@given(st.integers(1, 10_000), st.integers(1, 100), st.integers(0, 10_000))
def test_steps_follow_one_another_without_gap(n: int, batch: int, step: int) -> None:
    schedule = Schedule(n, batch)
    here, after = schedule.at(step), schedule.at(step + 1)
    assert here.position + here.count == after.position
    assert 1 <= here.count <= batch
    assert here.position == here.epoch * n + here.first


def test_a_short_tail_has_short_and_empty_slots() -> None:
    span = Schedule(10, 8).at(1)
    assert (span.epoch, span.first, span.count, span.position) == (0, 8, 2, 8)
    assert [span.slot_range(j, 2) for j in range(4)] == [(8, 10), (10, 10), (10, 10), (10, 10)]
    span = Schedule(11, 8).at(1)
    assert [span.slot_range(j, 2) for j in range(4)] == [(8, 10), (10, 11), (11, 11), (11, 11)]
    assert Schedule(10, 8).at(2).epoch == 1
    with pytest.raises(ValueError, match="from 0"):
        Schedule(10, 8).at(-1)
    with pytest.raises(ValueError, match="n_samples"):
        Schedule(0, 8)


def write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        target = folder / name.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return folder


def test_the_default_text_is_the_standard_library_without_tests() -> None:
    corpus = Corpus.open()
    text = corpus.data.tobytes()
    assert len(corpus) > 1_000_000
    assert b"class ArgumentParser" in text
    assert b"site-packages" not in corpus.name.encode()
    assert Corpus.open().sha256 == corpus.sha256
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()


def test_a_folder_is_read_in_order_without_hidden_empty_and_binary_files(tmp_path: Path) -> None:
    write(tmp_path, b=b"second", a__z=b"first\n", c=b"x\0y", d=b"", e="drei é\n".encode())
    write(tmp_path / ".git", config=b"hidden")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    assert Corpus.open(tmp_path).data.tobytes() == "first\nsecond\ndrei é\n".encode()


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, text=b"hello\n") / "text"
    assert Corpus.open(path).data.tobytes() == b"hello\n"


def test_a_changed_file_is_noticed_and_the_old_text_stays_readable(tmp_path: Path) -> None:
    path = write(tmp_path, text=b"hello\n") / "text"
    before = Corpus.open(path)
    path.write_bytes(b"jello\n")
    os.utime(path, ns=(1, 1))
    after = Corpus.open(path)
    assert (before.data.tobytes(), after.data.tobytes()) == (b"hello\n", b"jello\n")
    assert before.sha256 != after.sha256


def test_a_lost_or_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    path, cache = write(tmp_path, text=b"hello\n") / "text", tmp_path / "cache"
    sha256 = Corpus.open(path, cache).sha256
    (cache / f"{sha256}.u8").unlink()
    assert Corpus.open(path, cache).data.tobytes() == b"hello\n"
    for index in cache.glob("*.json"):
        index.write_text("{")
    assert Corpus.open(path, cache).sha256 == sha256
    assert not list(cache.glob("*.tmp"))


def test_several_processes_may_copy_the_same_text_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, text=os.urandom(1 << 20).hex().encode()) / "text"
    code = f"from elastic_harness.data.corpus import Corpus; print(Corpus.open({str(path)!r}).sha256)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    results = {process.communicate(timeout=60)[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(results) == 1
    copies = list((tmp_path / "cache" / "elastic_harness" / "corpora").iterdir())
    assert sorted(c.suffix for c in copies) == [".json", ".npy", ".u8"]


def test_opening_a_text_does_not_import_torch() -> None:
    code = "import sys; from elastic_harness.data.corpus import Corpus; Corpus.open(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_missing_and_empty_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        Corpus.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no text file"):
        Corpus.open(tmp_path)
    empty = write(tmp_path, empty=b"") / "empty"
    with pytest.raises(ConfigError, match="holds no text"):
        Corpus.open(empty)
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        Corpus.open("/dev/null")


def test_an_unusable_cache_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path, text=b"hello\n") / "text"
    with pytest.raises(InfrastructureError, match="XDG_CACHE_HOME"):
        Corpus.open(path, path / "cache")


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("corpora").is_absolute()


def dataset(tmp_path: Path, size: int, seq_length: int, fraction: float = 0.0) -> ResumableDataset:
    content = (np.arange(size) % 251 + 1).astype(np.uint8).tobytes()  # 251 is prime: windows differ
    path = write(tmp_path, text=content) / "text"
    return ResumableDataset(Corpus.open(path), seq_length, seed=3, validation_fraction=fraction)


def test_windows_hold_the_text_and_labels_run_one_ahead(tmp_path: Path) -> None:
    data = dataset(tmp_path, 900, 8)
    text = Corpus.open(tmp_path / "text").data.astype(np.int64)
    assert len(data) == (900 - 1) // 8 == 112
    batch = data.read(np.array([0, 111, 5]))
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 8)
    for row, sample in enumerate((0, 111, 5)):
        assert batch["input_ids"][row].tolist() == text[sample * 8 : sample * 8 + 8].tolist()
        assert batch["labels"][row].tolist() == text[sample * 8 + 1 : sample * 8 + 9].tolist()
    assert data.read(np.array([], dtype=np.int64))["input_ids"].shape == (0, 8)
    for bad in (-1, 112):
        with pytest.raises(IndexError, match=str(bad)):
            data.read([bad])


def test_pieces_are_cut_within_files_and_keep_their_keys_when_text_is_added(tmp_path: Path) -> None:
    texts = {name: os.urandom(50_000).hex().encode() for name in ("a", "b", "c")}
    few = Corpus.open(write(tmp_path / "few", a=texts["a"], c=texts["c"] * 11))
    many = Corpus.open(write(tmp_path / "many", a=texts["a"], b=texts["b"], c=texts["c"] * 11))
    size = len(texts["a"]) + 1  # and a newline, as none of them ends in one
    assert size in few.documents.tolist() and {size, 2 * size} <= set(many.documents.tolist())
    assert np.diff(few.documents.astype(np.int64)).max() <= 16 << 10
    assert len(few.documents) == len(few.keys) + 1 and few.documents[-1] == len(few)
    assert len(many.keys) > len(few.keys) and set(few.keys.tolist()) < set(many.keys.tolist())


def test_training_never_sees_what_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes((np.arange(1 << 20) // 4096).astype(np.uint8).tobytes())  # each piece has four letters of its own
    corpus = Corpus.open(path)

    def letters(split: str) -> set[int]:
        data = ResumableDataset(corpus, 512, validation_fraction=0.2, split=split)  # type: ignore[arg-type]
        return set(data.read(np.arange(len(data)))["input_ids"].flatten().tolist())

    assert letters("train").isdisjoint(letters("validation"))
    assert 8 < len(letters("validation")) < 110 and len(letters("train") | letters("validation")) == 256
    data = ResumableDataset(corpus, 512, validation_fraction=0.2)
    assert set(data.validation_batch(0, 50)["input_ids"].flatten().tolist()) <= letters("validation")


def test_validation_batches_are_the_same_every_time_and_wrap_around(tmp_path: Path) -> None:
    data = dataset(tmp_path, 30_000, 10, 0.2)
    assert torch.equal(data.validation_batch(2, 4)["labels"], data.validation_batch(2, 4)["labels"])
    windows = len(ResumableDataset(data.index, 10, split="validation", validation_fraction=0.2))
    wrapped = data.validation_batch(0, 2 * windows)["labels"]
    assert torch.equal(wrapped[:windows], wrapped[windows:])


def test_texts_shorter_than_a_window_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 9 tokens.*seq_length \+ 1 = 10"):
        dataset(tmp_path, 9, 9)
    assert len(dataset(tmp_path, 10, 9)) == 1
    with pytest.raises(ConfigError, match="held out"):
        dataset(tmp_path, 20, 9).validation_batch(0, 1)


def test_a_fingerprint_names_what_decides_the_samples(tmp_path: Path) -> None:
    first, second = dataset(tmp_path, 20_000, 8).fingerprint(), dataset(tmp_path, 20_000, 16).fingerprint()
    assert first["content"] == second["content"]
    assert first != second
    assert first != dataset(tmp_path, 20_000, 8, 0.2).fingerprint()


class Squares(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index), "y": torch.tensor(index * index)}


def test_a_map_style_dataset_is_read_by_sample_ids() -> None:
    data = MapStyle(Squares())
    batch = data.read(np.array([3, 1]))
    assert (batch["x"].tolist(), batch["y"].tolist()) == ([3, 1], [9, 1])
    assert len(data) == 10
    assert data.fingerprint()["n_samples"] == 10
    assert MapStyle(Squares(), collate_fn=len).read(np.array([3, 1])) == 2


def test_datasets_without_numbered_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="generator"):
        MapStyle(i for i in range(3))
    with pytest.raises(ConfigError, match="no samples"):
        MapStyle([])
