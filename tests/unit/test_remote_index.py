"""A remote index reads as a local one does, whatever the storage and the cache do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elastic_harness.data import ResumableDataset, ResumableLoader, TokenIndexFile
from elastic_harness.data import token_index as module
from elastic_harness.data.token_index import write_index
from elastic_harness.errors import ConfigError, InfrastructureError

from .range_server import RangeServer

obstore = pytest.importorskip("obstore")
TOKENS = 3_000_000  # 6 MB: six chunks


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> TokenIndexFile:
    path = tmp_path_factory.mktemp("origin") / "i.bin"
    tokens = np.random.default_rng(1).integers(0, 60_000, TOKENS, dtype=np.uint16)
    write_index(
        path,
        tokens=[tokens.tobytes()],
        lengths=np.full(1000, TOKENS // 1000, np.uint64),
        keys=np.random.default_rng(2).integers(0, 2**63, 1000).astype(np.uint64) * np.uint64(2),
        sources=np.zeros(1000, np.uint32),
        names=["a"],
        vocab_size=60_000,
        eot_id=0,
        tokenizer={"kind": "made up"},
    )
    return TokenIndexFile(path)


@pytest.fixture
def server(local: TokenIndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = RangeServer(Path(local.path))
    yield server
    server.close()


def cached(tmp_path: Path) -> list[Path]:
    return sorted(p for p in (tmp_path / "cache").rglob("*") if p.is_file())


def test_it_reads_the_same_and_fetches_once(local: TokenIndexFile, server: RangeServer, tmp_path: Path) -> None:
    index = TokenIndexFile(server.url)
    assert (len(index), index.fingerprint, index.n_documents) == (len(local), local.fingerprint, 1000)
    starts = np.random.default_rng(3).integers(0, TOKENS - 1025, 200)
    assert np.array_equal(index.read(starts, 1025), local.read(starts, 1025))
    assert np.array_equal(index.document(7), local.document(7))
    assert np.array_equal(index.keys, local.keys)
    asked = len(server.ranges)
    assert len(set(server.ranges)) == asked, "a chunk was fetched twice"
    again = TokenIndexFile(server.url)
    assert np.array_equal(again.read(starts, 1025), local.read(starts, 1025))
    assert len(server.ranges) == asked + 2, "only the header and the hashes are read again"
    assert not [p for p in cached(tmp_path) if p.suffix == ".tmp"]


def test_a_dataset_on_it_gives_the_same_samples(local: TokenIndexFile, server: RangeServer) -> None:
    def samples(index: TokenIndexFile) -> list[np.ndarray]:
        dataset = ResumableDataset(index, 1024, seed=3, validation_fraction=0.2, documents="separate", epochs=1)
        return [b["input_ids"].numpy() for b in ResumableLoader(dataset, batch_size=64)]

    for here, there in zip(samples(local), samples(TokenIndexFile(server.url)), strict=True):
        assert np.array_equal(here, there)


def test_what_is_asked_for_ahead_is_there(local: TokenIndexFile, server: RangeServer) -> None:
    index = TokenIndexFile(server.url)
    index.prefetch(np.arange(0, TOKENS - 10, 100_000), 10)
    end = time.monotonic() + 30
    while len(server.ranges) < 2 + 6 and time.monotonic() < end:
        time.sleep(0.01)
    asked = len(server.ranges)
    starts = np.arange(0, TOKENS - 10, 50_000)
    assert np.array_equal(index.read(starts, 10), local.read(starts, 10))
    assert len(server.ranges) == asked == 8


def test_a_damaged_chunk_in_the_cache_is_fetched_again(
    local: TokenIndexFile, server: RangeServer, tmp_path: Path
) -> None:
    everything = np.arange(0, TOKENS - 1000, 1000)
    TokenIndexFile(server.url).read(everything, 1000)
    chunks = cached(tmp_path)
    with open(chunks[0], "r+b") as file:
        file.seek(1234)
        file.write(b"\xff\x00\xff")
    os.truncate(chunks[1], 100)
    chunks[2].write_bytes(chunks[3].read_bytes())
    asked = len(server.ranges)
    assert np.array_equal(TokenIndexFile(server.url).read(everything, 1000), local.read(everything, 1000))
    assert len(server.ranges) == asked + 2 + 3


def test_wrong_bytes_are_asked_for_again_and_then_reported(local: TokenIndexFile, server: RangeServer) -> None:
    index = TokenIndexFile(server.url)
    wrong = iter([True])
    server.fault = lambda low, content: bytes(len(content)) if next(wrong, False) else content
    assert np.array_equal(index.read(np.array([5]), 10), local.read(np.array([5]), 10))
    server.fault = lambda low, content: bytes(len(content))
    with pytest.raises(InfrastructureError, match="3 times they came with the hash"):
        index.read(np.array([1_000_000]), 10)
    server.fault = lambda low, content: content
    index.verify()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [503, None], ids=["unavailable", "cut"])
def test_a_storage_that_falters_is_tried_again(local: TokenIndexFile, server: RangeServer, fault: int | None) -> None:
    index = TokenIndexFile(server.url)
    faults = iter([fault, fault])
    server.fault = lambda low, content: next(faults, content)
    assert np.array_equal(index.read(np.array([5]), 10), local.read(np.array([5]), 10))


def test_the_cache_is_bounded(local: TokenIndexFile, server: RangeServer, tmp_path: Path) -> None:
    limit = 2 * module.CHUNK_BYTES
    index = TokenIndexFile(server.url, cache_bytes=limit)
    starts = np.arange(0, TOKENS - 1000, 1000)
    assert np.array_equal(index.read(starts, 1000), local.read(starts, 1000))
    assert 0 < sum(p.stat().st_size for p in cached(tmp_path)) <= limit


def test_a_full_disk_costs_only_the_cache(
    local: TokenIndexFile, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = TokenIndexFile(server.url)

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert np.array_equal(index.read(np.array([5]), 10), local.read(np.array([5]), 10))
    assert cached(tmp_path) == []


def test_what_is_not_there_is_named(server: RangeServer) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        TokenIndexFile(server.url.replace("i.bin", "other.bin"))
    with pytest.raises(ConfigError, match="use read"):
        _ = TokenIndexFile(server.url).tokens
    server.fault = lambda low, content: b"?" * len(content)
    with pytest.raises(ConfigError, match="is not a token index"):
        TokenIndexFile(server.url)


def test_a_forked_child_is_told(server: RangeServer) -> None:
    index = TokenIndexFile(server.url)
    child = os.fork()
    if child == 0:
        try:
            index.read(np.array([5]), 10)
        except ConfigError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
def test_worker_processes_open_it_by_its_address(local: TokenIndexFile, server: RangeServer) -> None:
    here = ResumableLoader(ResumableDataset(local, 1024, epochs=1), batch_size=64)
    there = ResumableLoader(
        ResumableDataset(TokenIndexFile(server.url), 1024, epochs=1),
        batch_size=64,
        num_workers=2,
        multiprocessing_context="spawn",
    )
    for a, b in zip(here, there, strict=True):
        assert np.array_equal(a["sample_id"], b["sample_id"]) and np.array_equal(a["labels"], b["labels"])


@pytest.mark.slow
def test_it_opens_from_s3(local: TokenIndexFile, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    obstore.put(obstore.store.from_url(s3), "a/i.bin", Path(local.path))
    index = TokenIndexFile(f"{s3}/a/i.bin", verify=True)
    assert np.array_equal(index.read(np.array([5, 999_999]), 1000), local.read(np.array([5, 999_999]), 1000))
    with pytest.raises(ConfigError, match="does not exist"):
        TokenIndexFile(f"{s3}/a/j.bin")
