"""From files to an index: every reader and tokenizer, bad input, and the same bytes however it is done."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from elastic_harness import cli
from elastic_harness.commands import index as index_command
from elastic_harness.data import ResumableDataset, index_builder, readers, tokenizers
from elastic_harness.data.index_builder import build
from elastic_harness.data.token_index import TokenIndexFile
from elastic_harness.errors import ConfigError

TEXTS = ["first text", "second, with a \u20ac sign", "third\r\nline", "NUL \0 inside", "<|endoftext|> is text"]


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: t}) + "\n" for t in texts))
    return path


def texts_of(path: Path) -> list[str]:
    index = TokenIndexFile(path, verify=True)
    tokenizer = tokenizers.restore(index.tokenizer, index.tokenizer_file())
    documents = [index.document(d) for d in range(index.n_documents)]
    assert all(d[-1] == index.eot_id for d in documents)
    return [tokenizer.decode(d[:-1]) for d in documents]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 64)
    monkeypatch.setattr(index_builder, "BATCH_BYTES", 50)


def test_jsonl_comes_back(tmp_path: Path) -> None:
    report = build([str(jsonl(tmp_path / "a.jsonl", TEXTS))], tmp_path / "i.bin")
    assert texts_of(tmp_path / "i.bin") == TEXTS
    assert (report.documents, report.bad, report.empty) == (5, 0, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "i.bin"]


@pytest.mark.usefixtures("small_units")
def test_lines_across_units_are_read_once(tmp_path: Path) -> None:
    texts = [f"text {i} " + "x" * (i * 37 % 150) for i in range(60)]
    path = jsonl(tmp_path / "a.jsonl", texts)
    assert len(readers.plan_units([path])) > 50
    build([str(path)], tmp_path / "i.bin")
    assert texts_of(tmp_path / "i.bin") == texts


@pytest.mark.usefixtures("small_units")
def test_units_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEXTS * 9)
    build([str(path)], tmp_path / "1.bin")
    monkeypatch.setattr(readers, "UNIT_BYTES", 1 << 20)
    build([str(path)], tmp_path / "2.bin")
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()


def test_compressed_files_a_folder_and_a_pattern(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path / "in"
    folder.mkdir()
    line = json.dumps({"text": "packed"}).encode() + b"\n"
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(line))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(line))
    (folder / "c.txt").write_bytes(b"\xef\xbb\xbfplain\r\n")
    (folder / ".hidden").write_text("no")
    build([str(folder)], tmp_path / "i.bin")
    assert texts_of(tmp_path / "i.bin") == ["packed", "packed", "plain\r\n"]
    index = TokenIndexFile(tmp_path / "i.bin")
    assert [Path(index.names[s]).name for s in index.sources.tolist()] == ["a.jsonl.gz", "b.jsonl.zst", "c.txt"]
    build([str(folder / "*.txt")], tmp_path / "j.bin")
    assert texts_of(tmp_path / "j.bin") == ["plain\r\n"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["a", "b", None]}), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="no column 'text'; it has body"):
        build([str(tmp_path / "p.parquet")], tmp_path / "i.bin")
    with pytest.raises(ConfigError, match="line 3: a NoneType, not text"):
        build([str(tmp_path / "p.parquet")], tmp_path / "i.bin", text_key="body")
    build([str(tmp_path / "p.parquet")], tmp_path / "i.bin", text_key="body", max_bad_fraction=0.5)
    assert texts_of(tmp_path / "i.bin") == ["a", "b"]
    zstandard = pytest.importorskip("zstandard")
    whole = (tmp_path / "p.parquet").read_bytes()
    for name, content in (("q.parquet.gz", gzip.compress(whole)), ("q.parquet.zst", zstandard.compress(whole))):
        (tmp_path / name).write_bytes(content)
        build([str(tmp_path / name)], tmp_path / "j.bin", text_key="body", max_bad_fraction=0.5)
        assert texts_of(tmp_path / "j.bin") == ["a", "b"]


def test_a_large_plain_text_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    text = "\n".join(f"line {i}" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("x" * 450)  # not one line end to cut at
    build([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tmp_path / "i.bin")
    assert texts_of(tmp_path / "i.bin") == [text, "x" * 450]
    monkeypatch.setattr(readers, "PIECE_BYTES", 1 << 20)
    build([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tmp_path / "j.bin")
    assert (tmp_path / "i.bin").read_bytes() == (tmp_path / "j.bin").read_bytes(), "its key is that of the whole"


@pytest.mark.usefixtures("small_units")
def test_bad_lines_are_counted_and_placed(tmp_path: Path) -> None:
    good = json.dumps({"text": "good " * 5}).encode()
    bad = [b'{"text": 3}', b"not json", b'{"other": "x"}', b'"text"', b'{"text": "\xff"}', b'{"text": "\\ud800"}']
    lines = [good] * 20 + bad + [b"", b'{"text": ""}'] + [good] * 3
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        build([str(tmp_path / "a.jsonl")], tmp_path / "i.bin")
    for number, reason in enumerate(
        ("no text at 'text'", "no JSON", "it has other", "a str, not", "no JSON", "UTF-8"), 21
    ):
        assert f"a.jsonl, line {number}: " in str(caught.value) and reason in str(caught.value)
    assert "6 of 29 documents are bad" in str(caught.value) and not (tmp_path / "i.bin").exists()
    report = build([str(tmp_path / "a.jsonl")], tmp_path / "i.bin", max_bad_fraction=0.3)
    assert (report.documents, report.bad, report.empty) == (23, 6, 2)


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff\xfe")
    build([str(tmp_path / "a.txt")], tmp_path / "i.bin")
    assert TokenIndexFile(tmp_path / "i.bin").tokens.tolist() == [*b"ok \xff\xfe", 256], "bytes are bytes"
    bpe = tokenizers.train_bpe(["some text"], 260)
    with pytest.raises(ConfigError, match="no UTF-8"):
        build([str(tmp_path / "a.txt")], tmp_path / "j.bin", tokenizer=bpe)


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (["nowhere"], "does not exist"),
        (["*.none"], "matches no file"),
        (["empty"], "holds no file"),
        (["a.txt"], "no document"),
    ],
)
def test_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], named: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match=named):
        build(inputs, tmp_path / "i.bin")


def test_inputs_that_cannot_be_meant(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ConfigError, match="given twice"):
        build([str(path), str(path)], tmp_path / "i.bin")
    with pytest.raises(ConfigError, match="one of the inputs"):
        build([str(path)], path)


def test_special_tokens_in_a_text_stay_text(tmp_path: Path) -> None:
    text = "before <|endoftext|> after"
    bpe = tokenizers.train_bpe(TEXTS, 300)
    build([str(jsonl(tmp_path / "a.jsonl", [text]))], tmp_path / "i.bin", tokenizer=bpe)
    index = TokenIndexFile(tmp_path / "i.bin")
    assert (index.tokens == index.eot_id).sum() == 1
    assert texts_of(tmp_path / "i.bin") == [text], "the index brings its tokenizer along"


def test_tokenizers_that_do_not_exist(tmp_path: Path) -> None:
    for spec, named in (("./none.json", "does not exist"), ("tiktoken:none", "no encoding")):
        with pytest.raises(ConfigError, match=named):
            tokenizers.load(spec)
    with pytest.raises(ConfigError, match="more than 256"):
        tokenizers.train_bpe(["x"], 10)
    (tmp_path / "tokenizer.json").write_text(tokenizers.train_bpe(["some text"], 270).file)
    assert tokenizers.load(str(tmp_path)).identity == tokenizers.load(str(tmp_path / "tokenizer.json")).identity
    with pytest.raises(ConfigError, match="--eot"):
        tokenizers.load(str(tmp_path), eot="<stop>")


def test_tokenizers_are_taken_as_objects_too(tmp_path: Path) -> None:
    bpe = tokenizers.train_bpe(TEXTS, 300)
    library_s = importlib.import_module("tokenizers").Tokenizer.from_str(bpe.file)
    fast = SimpleNamespace(backend_tokenizer=library_s, eos_token="<|endoftext|>")  # as transformers has it
    for given in (bpe, library_s, fast):
        assert tokenizers.chosen(given).identity == bpe.identity
    file = tmp_path / "tokenizer.json"
    file.write_text(bpe.file)
    assert tokenizers.chosen(file).identity == bpe.identity
    build([str(jsonl(tmp_path / "a.jsonl", TEXTS))], tmp_path / "i.bin", tokenizer=library_s)
    assert texts_of(tmp_path / "i.bin") == TEXTS
    for odd in (7, None, str.split, SimpleNamespace(encode=str.split)):
        with pytest.raises(ConfigError, match=f"tokenizer is {type(odd).__name__}; give bytes"):
            ResumableDataset(data_files=["x"], tokenizer=odd, seq_length=8)


def test_an_encoding_of_tiktoken_that_only_has_the_name_is_refused() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    registry = importlib.import_module("tiktoken.registry")
    ranks = {bytes([i]): i for i in range(256)}
    made = {
        name: tiktoken.Encoding(name, pat_str=r".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end})
        for name, end in (("ours", 256), ("other", 300))
    }
    registry.ENCODINGS["ours"] = made["ours"]
    try:
        assert tokenizers.chosen(made["ours"]).identity == {"kind": "tiktoken", "name": "ours"}
        made["other"].name = "ours"
        with pytest.raises(ConfigError, match="is another one"):
            tokenizers.chosen(made["other"])
    finally:
        del registry.ENCODINGS["ours"]


def test_tiktoken_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    """A real request, to a proxy at which nobody listens."""
    pytest.importorskip("tiktoken")
    program = "from elastic_harness.data import tokenizers; tokenizers.load('tiktoken:gpt2')"
    offline = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    variables = {**os.environ, **offline}
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("elastic_harness.errors.ConfigError: tiktoken keeps no copy"), ended
    assert "Connection refused" in ended.stderr.splitlines()[-1] and "TIKTOKEN_CACHE_DIR" in ended.stderr


@pytest.mark.usefixtures("small_units")
def test_a_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEXTS * 5)
    build([str(path)], tmp_path / "whole.bin")
    make, made = index_builder._make_part, []

    def breaking(folder: Path, number: int, *rest: object) -> None:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(number)
        make(folder, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(index_builder, "_make_part", breaking)
    with pytest.raises(KeyboardInterrupt):
        build([str(path)], tmp_path / "i.bin")
    made.clear()
    monkeypatch.setattr(index_builder, "_make_part", lambda f, n, *r: (made.append(n), make(f, n, *r)))
    build([str(path)], tmp_path / "i.bin")
    assert made[0] == 4 and (tmp_path / "i.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    made.clear()
    jsonl(path, TEXTS * 6)  # other input: the parts of the old one are of no use
    build([str(path)], tmp_path / "i.bin")
    assert made[0] == 0 and texts_of(tmp_path / "i.bin") == TEXTS * 6


def test_keys_depend_on_the_content_alone(tmp_path: Path) -> None:
    build([str(jsonl(tmp_path / "a.jsonl", TEXTS))], tmp_path / "1.bin")
    build([str(jsonl(tmp_path / "b.jsonl", ["new", *reversed(TEXTS)]))], tmp_path / "2.bin")
    first, second = TokenIndexFile(tmp_path / "1.bin"), TokenIndexFile(tmp_path / "2.bin")
    assert second.keys[1:][::-1].tolist() == first.keys.tolist()


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, index = jsonl(tmp_path / "a.jsonl", TEXTS), str(tmp_path / "i.bin")
    assert index_command.main(["build", str(path), "-o", index, "--train-bpe", "280", "--processes", "1"]) == 0
    assert "5 documents" in capsys.readouterr().out
    assert index_command.main(["info", index]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 5 and facts["vocab_size"] == 280 and facts["tokenizer"]["kind"] == "huggingface"
    assert index_command.main(["verify", index]) == 0
    assert index_command.main(["head", index, "-n", "2"]) == 0
    assert "first text" in capsys.readouterr().out
    packed = str(tmp_path / "packed.bin")
    for words, name, value in (
        (["build", str(path), "-o", index, "--processes", "1"], "documents", 5),
        (["pack", index, "-o", packed, "--seq-length", "16"], "seq_length", 16),
        (["verify", packed], "path", packed),
        (["info", packed], "path", packed),
    ):
        assert cli.main(["index", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[name] == value
    assert cli.main(["index", "head", index, "-n", "2", "--tokens", "4", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["documents"]
    assert (first["text"], first["whole"]) == (TEXTS[0][:4], False) and second["document"] == 1
    assert cli.main(["index", "build", str(path), "-o", index, "--max-bad-fraction", "2"]) == 2
    assert "between 0 and 1" in capsys.readouterr().err


def test_a_bad_piece_does_not_join_two_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 8)
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\xff\xff\xff\n\xfe\xfe")
    (tmp_path / "b.txt").write_bytes(b"next")
    bpe = tokenizers.train_bpe(["good next"], 270)
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    report = build(inputs, tmp_path / "i.bin", tokenizer=bpe, max_bad_fraction=1)
    assert texts_of(tmp_path / "i.bin") == ["good\n", "next"] and report.bad == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.parquet.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    pytest.importorskip("zstandard")
    pytest.importorskip("pyarrow")
    packed = gzip.compress(b'{"text": "x"}\n' * 100)
    (tmp_path / name).write_bytes(packed[:30] + bytes(10) + packed[40:])
    with pytest.raises(ConfigError, match=name):
        build([str(tmp_path / name)], tmp_path / "i.bin")


def test_a_second_build_at_the_same_time_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    with index_builder._exclusive(tmp_path / "i.bin", wait=False):
        with pytest.raises(ConfigError, match="at work"):
            build([str(path)], tmp_path / "i.bin")
    build([str(path)], tmp_path / "i.bin")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "i.bin"]


@pytest.mark.slow
def test_many_small_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(10_000):
        (folder / f"{i:05d}.txt").write_bytes(b"%d" % i)
    assert len(readers.plan_units(readers.find_inputs([str(folder)]))) == 10
    build([str(folder)], tmp_path / "i.bin")
    assert texts_of(tmp_path / "i.bin") == [str(i) for i in range(10_000)]
    assert np.array_equal(TokenIndexFile(tmp_path / "i.bin").sources, np.arange(10_000))


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_odd_texts_come_back(tmp_path: Path, tokenizer: str) -> None:
    """Line ends of all kinds, a byte order mark inside, controls, one letter, and one document larger than a batch."""
    texts = ["a\r\nb\rc\n", "\ufeffmarked", "\0\0", "x", " ", "\u2028\u2029\x85", "\U0001f600" * 3, "long " * 300_000]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(texts)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", '{"text": ""}']).encode())
    chosen = tokenizers.train_bpe(["some text"], 300) if tokenizer == "bpe" else "bytes"
    report = build([str(path)], tmp_path / "i.bin", tokenizer=chosen)
    assert texts_of(tmp_path / "i.bin") == texts
    assert report.empty == 2


def test_the_standard_library_decides_what_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index must not depend on whether a faster parser is installed."""
    lines = [
        b'{"text": "a", "n": NaN}', b'{"text": "b", "text": "c"}', b'{"text": "d", "n": 1e999}', b'{"text": "\\ud800"}',
        b'{"text": "e"} ', b'{"text": "f",}', b"[" * 3000, b'{"text": "g", "n": ' + b"9" * 400 + b"}",
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = []
    for loads in (readers._fast_loads, json.loads):
        monkeypatch.setattr(readers, "_fast_loads", loads)
        report = build([str(tmp_path / "a.jsonl")], tmp_path / "i.bin", max_bad_fraction=1.0)
        found.append((texts_of(tmp_path / "i.bin"), report.problems))
    assert found[0] == found[1] and found[0][0] == ["a", "c", "d", "e", "g"] and len(found[0][1]) == 3
