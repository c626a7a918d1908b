"""The index's file: what is written comes back, and nothing damaged is taken for whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.data import token_index
from elastic_harness.data.packing import pack
from elastic_harness.data.token_index import CHUNK_BYTES, PAGE, TokenIndexFile, token_dtype, write_index
from elastic_harness.errors import ConfigError, InfrastructureError


def make(path: Path, documents: list[list[int]], vocab_size: int = 257, **more: object) -> TokenIndexFile:
    dtype = token_dtype(vocab_size)
    write_index(
        path,
        tokens=(np.array(d, dtype).tobytes() for d in documents),
        lengths=np.array([len(d) for d in documents], np.uint64),
        keys=np.arange(len(documents), dtype=np.uint64) * np.uint64(3),
        sources=np.zeros(len(documents), np.uint32),
        names=["a.txt"],
        vocab_size=vocab_size,
        eot_id=vocab_size - 1,
        tokenizer={"kind": "bytes"},
        **more,  # type: ignore[arg-type]
    )
    return TokenIndexFile(path)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=40), min_size=1, max_size=20))
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    index = make(tmp_path_factory.mktemp("index") / "i.bin", documents)
    assert [index.document(d).tolist() for d in range(index.n_documents)] == documents
    assert len(index) == sum(map(len, documents)) and index.names == ["a.txt"]
    assert index.keys.tolist() == [3 * d for d in range(len(documents))]
    index.verify()


def test_the_type_follows_the_vocabulary() -> None:
    assert [token_dtype(n).itemsize for n in (257, 1 << 16, (1 << 16) + 1, 1 << 32)] == [2, 2, 4, 4]
    with pytest.raises(ConfigError, match="at most 32 bits"):
        token_dtype((1 << 32) + 1)


def test_large_ids_come_back(tmp_path: Path) -> None:
    index = make(tmp_path / "i.bin", [[70_000, 99_999]], vocab_size=100_000)
    assert index.tokens.dtype == np.uint32 and index.tokens.tolist() == [70_000, 99_999]


def test_the_fingerprint_is_of_tokens_and_tokenizer(tmp_path: Path) -> None:
    first = make(tmp_path / "1.bin", [[1, 2], [3]])
    assert make(tmp_path / "2.bin", [[1, 2], [3]]).fingerprint == first.fingerprint
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()
    others = [[[1, 2], [4]], [[1], [2, 3]]]
    assert all(make(tmp_path / "3.bin", d).fingerprint != first.fingerprint for d in others)
    assert make(tmp_path / "3.bin", [[1, 2], [3]], vocab_size=300).fingerprint != first.fingerprint


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """In the header on opening; in any section, and in the padding, by `verify`, which says where."""
    path = tmp_path / "i.bin"
    documents = [[1] * 3000, [2] * 5]
    index = make(path, documents, packing=pack(np.array([0, 3000, 3005]), np.arange(2, dtype=np.uint64), 100))
    assert {"pack_bins", "pack_starts", "pack_lengths"} <= set(index.sections)
    content = path.read_bytes()
    places = {name: section.offset for name, section in index.sections.items() if section.nbytes}
    for name, offset in {"magic": 0, "header": 40, "padding": PAGE + 7000, **places}.items():
        damaged = bytearray(content)
        damaged[offset] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ConfigError) as caught:
            TokenIndexFile(path, verify=True)
        assert str(path) in str(caught.value)
        if name in places and name != "chunks":
            assert name in str(caught.value), str(caught.value)


def test_damage_in_a_later_chunk_is_placed(tmp_path: Path) -> None:
    path = tmp_path / "i.bin"
    make(path, [[7] * (CHUNK_BYTES // 2 + 10)])
    with open(path, "r+b") as file:
        file.seek(PAGE + CHUNK_BYTES + 3)
        file.write(b"x")
    with pytest.raises(ConfigError, match=f"bytes {PAGE + CHUNK_BYTES} to"):
        TokenIndexFile(path).verify()


@pytest.mark.parametrize("kept", [0, 7, 100, PAGE - 1, PAGE, PAGE + 10, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "i.bin"
    make(path, [[1, 2, 3]])
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    with pytest.raises(ConfigError, match=r"truncated|not a token index"):
        TokenIndexFile(path)


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "i.bin"
    with pytest.raises(ConfigError, match="does not exist"):
        TokenIndexFile(path)
    path.write_bytes(b"some text\n" * 1000)
    with pytest.raises(ConfigError, match="not a token index"):
        TokenIndexFile(path)
    make(path, [[1]])
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<I", 9)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"version 9.*reads 1; update"):
        TokenIndexFile(path)
    content[8:12] = struct.pack(">I", 1)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"version 16777216.*big-endian"):
        TokenIndexFile(path)


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "i.bin"
    make(path, [[1]])
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_index.os, "fsync", full)
    with pytest.raises(InfrastructureError, match="free space"):
        make(path, [[2]])
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["i.bin"]


def test_the_documents_must_have_the_tokens(tmp_path: Path) -> None:
    nothing = np.empty(0, np.uint64)
    with pytest.raises(ValueError, match="2 tokens were given, but the documents have 0"):
        write_index(
            tmp_path / "i.bin",
            tokens=[b"\0" * 4],
            lengths=nothing,
            keys=nothing,
            sources=np.empty(0, np.uint32),
            names=[],
            vocab_size=257,
            eot_id=256,
            tokenizer={},
        )
    assert not list(tmp_path.iterdir())


def test_reading_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    index = make(tmp_path / "i.bin", [[1, 2, 3]])
    assert index.read(np.array([0, 1]), 2).tolist() == [[1, 2], [2, 3]]
    with pytest.raises(IndexError, match="it has 3 tokens"):
        index.read(np.array([2]), 2)
    with pytest.raises(IndexError, match="documents 0 … 0"):
        index.document(1)


def test_the_header_is_plain_json(tmp_path: Path) -> None:
    """What docs/data.md says, read without this program."""
    make(tmp_path / "i.bin", [[1, 2, 256]])
    content = (tmp_path / "i.bin").read_bytes()
    magic, version, length = struct.unpack_from("<8sII", content)
    header = json.loads(content[16 : 16 + length])
    assert (magic, version) == (b"EHTOKENS", 1)
    offset, nbytes, dtype = header["sections"]["tokens"]
    assert np.frombuffer(content[offset : offset + nbytes], dtype).tolist() == [1, 2, 256]
