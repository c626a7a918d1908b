"""Every reader of bytes, JSON or the environment, given anything: an error that says what is wrong, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_harness import names, shape
from elastic_harness.agent.options import LaunchOptions, parse
from elastic_harness.agent.reporting.records import Records
from elastic_harness.agent.workers.diagnosis import Shown, as_member
from elastic_harness.checkpoint.disk import manifest
from elastic_harness.commands import manage
from elastic_harness.contract import messages, wire
from elastic_harness.contract.board import BoardReader
from elastic_harness.contract.checkpoint_event import CheckpointEvent
from elastic_harness.contract.codec import Codec, Unknown
from elastic_harness.contract.commands import COMMANDS
from elastic_harness.contract.forking import BLANK, FROM_FORK_SERVER, TO_FORK_SERVER
from elastic_harness.data.token_index import FIXED, HASH, MAGIC, PAGE, VERSION, TokenIndexFile
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.failpoints import _parse
from elastic_harness.health.waits import find_culprits
from elastic_harness.membership.codec import decode, encode, from_text
from elastic_harness.membership.types import Report
from elastic_harness.runs import folder
from elastic_harness.runs.events import read_events
from elastic_harness.runs.ledger import LedgerError, read_ledger

HUGE = 10**400
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(HUGE) | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=6), inside, max_size=4),
    max_leaves=12,
)
BYTES = st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000)


def refuses(read: Callable[[], object], *errors: type[Exception]) -> None:
    """It returns, or raises one of these."""
    try:
        read()
    except errors as error:
        assert str(error)


@settings(max_examples=200)
@given(BYTES)
def test_frames(body: bytes) -> None:
    refuses(lambda: wire.decode(body), wire.Malformed)
    refuses(lambda: CheckpointEvent.from_line(body), wire.Malformed)
    text = body.decode(errors="replace")
    refuses(lambda: from_text(text), ValueError)
    refuses(lambda: from_text("z" + text), ValueError)


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=40)))
def test_a_stream_of_anything_is_cut_into_frames_or_refused(chunks: list[bytes]) -> None:
    decoder = wire.Decoder()
    for chunk in chunks:
        try:
            assert all(isinstance(frame, bytes) for frame in decoder.feed(chunk))
        except wire.Malformed:
            return


def test_frames_before_a_wrong_one_are_not_lost() -> None:
    decoder = wire.Decoder()
    assert decoder.feed(wire.encode({"type": "a"}) + b"\xff" * 4) == [b'{"type":"a"}']
    with pytest.raises(wire.Malformed, match="4294967295 bytes"):
        decoder.feed(b"")


st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))  # it is not equal to itself
CODECS = (messages.TO_AGENT, messages.TO_WORKER, COMMANDS, TO_FORK_SERVER, FROM_FORK_SERVER, BLANK)
DECISIONS = st.builds(messages.PolicyDecision, evidence=st.dictionaries(st.text(max_size=4), st.integers(0, 9)))
PLAIN = {dict[str, Any]: st.dictionaries(st.text(max_size=4), st.booleans()), Any: st.integers(0, 9)}
PLAIN[tuple[messages.PolicyDecision, ...]] = st.lists(DECISIONS, max_size=2).map(tuple)


def written(codec: Codec, message: object) -> Any:
    """The JSON object that goes over the wire."""
    (frame,) = wire.Decoder().feed(wire.encode(codec.pack(message)))
    return wire.decode(frame)


def any_message(cls: type[Any]) -> st.SearchStrategy[Any]:
    if cls is CheckpointEvent:
        return st.builds(cls, event=st.just("checkpoint_saved"), fields=st.just({"step": 3}))
    plain = {name: PLAIN[hint] for name, hint in shape.of(cls).items() if hint in PLAIN}
    fill = {name: st.none() for name, hint in shape.of(cls).items() if hint == dict[str, Any] | None}
    return st.builds(cls, **{**{name: st.from_type(hint) for name, hint in shape.of(cls).items()}, **plain, **fill})


MESSAGES = st.sampled_from([(codec, name) for codec in CODECS for name in codec.classes])


@pytest.mark.slow
@settings(max_examples=300)
@given(MESSAGES, st.data())
def test_every_message_comes_back(which: tuple[Codec, str], data: st.DataObject) -> None:
    codec, name = which
    message = data.draw(any_message(codec.classes[name]))
    assert codec.unpack(written(codec, message)) == message
    assert codec.unpack({**written(codec, message), "of a later version": 1}) == message


@pytest.mark.slow
@settings(max_examples=300)
@given(MESSAGES, st.data(), JSON)
def test_one_wrong_field_is_named(which: tuple[Codec, str], data: st.DataObject, value: Any) -> None:
    codec, name = which
    whole = written(codec, data.draw(any_message(codec.classes[name])))
    field = data.draw(st.sampled_from(sorted(whole)))
    try:
        codec.unpack({**whole, field: value})
    except Unknown as error:
        assert field in ("type", "command") and repr(value)[:20] in str(error)
    except wire.Malformed as error:
        assert name in str(error) or field in ("type", "command")


@pytest.mark.parametrize("wrong", [{}, {"type": 7}, {"type": None}, {"type": ["report"]}, {"type": "report"}])
def test_messages_without_a_type_or_fields(wrong: dict[str, Any]) -> None:
    with pytest.raises(wire.Malformed):
        messages.TO_AGENT.unpack(wrong)


def test_the_protocol_s_page_lists_the_messages() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for title, codec in (("Worker → agent", messages.TO_AGENT), ("Agent → worker", messages.TO_WORKER)):
        rows = [f"| `{name}` {{{', '.join(shape.of(cls))}}} | {said(cls)} |" for name, cls in codec.classes.items()]
        table = "\n".join([f"| {title} | |", "|---|---|", *rows])
        assert table in page, f"docs/protocol.md should have:\n\n{table}"
    assert f"`hello.protocol` is {messages.PROTOCOL}" in " ".join(page.split())


def said(cls: type[Any]) -> str:
    """The first paragraph of its docstring, on one line."""
    return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())


@pytest.mark.slow
@settings(max_examples=200)
@given(JSON)
@example({"is": "Limits", "min_workers": "x"})
@example({"is": ["Report"]})
@example({"is": "Report", "generation": 1, "version": HUGE})
def test_values_of_the_membership(data: Any) -> None:
    refuses(lambda: decode(data), ValueError)
    if isinstance(data, dict):
        refuses(lambda: decode({**encode(Report(1, 2)), **data}), ValueError)


@settings(max_examples=100)
@given(st.binary(min_size=56, max_size=56))
def test_a_board_may_hold_anything(content: bytes) -> None:
    board = BoardReader("x")
    board._page[:56] = content
    assert isinstance(board.read().where, str)
    board.close()


@settings(max_examples=100)
@given(st.binary(min_size=200, max_size=200))
def test_a_wait_on_a_board_may_be_anything(content: bytes) -> None:
    board = BoardReader("x")
    board._page[:200] = content
    board._page[64:72] = content[:8]  # the beat, so that the wait counts
    wait = board.wait()
    known = as_member(Shown(board.read(), wait, False), None, lambda generation: ("w0-1", "w1-1"))
    assert find_culprits({"w0-1": known}) is not None and board.answers in (True, False)
    assert wait is None or all(isinstance(part.in_words(wait.step), str) for part in wait.parts)
    board.close()


@pytest.mark.slow
@settings(max_examples=60)
@given(content=BYTES)
def test_files_of_a_run(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("run")
    (run / "run.json").write_bytes(content)
    refuses(lambda: folder.read_record(run), InfrastructureError)
    (run / "events.jsonl").write_bytes(content + b"\n")
    refuses(lambda: list(read_events(run / "events.jsonl")), InfrastructureError)
    (run / "ledger.jsonl").write_bytes(content + b"\n" + content + b"\n")
    refuses(lambda: read_ledger(run), LedgerError)
    (run / "manifest.json").write_bytes(content)
    assert manifest.read(run, "step-00000001") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("born", "yes"), ("lineage", "1"), ("lineage", HUGE), ("options", []), ("argv", "x"), ("created", "now")],
)
def test_a_record_of_a_run_with_a_wrong_field(tmp_path: Path, field: str, value: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "a", field: value}))
    with pytest.raises(InfrastructureError, match=f"run.json is damaged \\({field} is .*; it must be"):
        Records(folder.RunFolder(tmp_path))


def test_options_come_back_or_are_refused() -> None:
    options = parse(["--nproc-per-node", "2", "script.py"]).options
    kept = json.loads(json.dumps(options.to_json()))
    assert LaunchOptions.from_json(kept) == options == LaunchOptions.from_json({**kept, "of a later version": 1})
    for wrong in ({}, {**kept, "workers": "2"}, {**kept, "command": "x"}):
        with pytest.raises(InfrastructureError, match=r"options in run.json are damaged"):
            LaunchOptions.from_json(wrong)


def test_a_counter_of_generations_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "generation").write_bytes(b"9" * 60)
    assert Records(folder.RunFolder(tmp_path)).number == 0


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, record in (("a", b"[]"), ("b", b'{"run_id": "b"}'), ("c", b'{"run_id": "c"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_bytes(record)
    (tmp_path / "c" / "events.jsonl").write_text('{"event": "step_committed"}\n7\n')
    assert manage.ls([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert (said.out.count("damaged"), said.out.count("unknown"), said.err.count("elastic-harness ls: ")) == (1, 2, 1)


def index_with(header: bytes) -> bytes:
    """A token index whose header has the right hash, whatever it says."""
    start = FIXED.pack(MAGIC, VERSION, len(header)) + header
    return (start + HASH.pack(xxhash.xxh3_64_intdigest(start))).ljust(2 * PAGE, b"\0")


@settings(max_examples=60)
@given(header=BYTES.filter(lambda content: len(content) < 1000))
@example(header=b'{"sections": {"tokens": ["a", 1, "<u2"]}}')
@example(header=b'{"sections": []}')
def test_the_header_of_an_index(header: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("index") / "i.bin"
    path.write_bytes(index_with(header))
    with pytest.raises(ConfigError, match=r"i\.bin"):
        TokenIndexFile(path)


@pytest.mark.parametrize(
    "rule",
    [
        *("slot.forward step=x kill", "slot.forward hit kill", "slot.forward hit=-1 kill", "slot.forward when=3 kill"),
        *("slot.forward chance=often kill", "slot.forward kil", "slot.forward pause", "slot.forward kill:3"),
    ],
)
def test_rules_of_failpoints(rule: str) -> None:
    with pytest.raises(ConfigError, match="conditions are"):
        _parse(rule)


@pytest.mark.parametrize("value", ["", "x", "1.5", "0x2"])
def test_variables_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ConfigError, match="WORLD_SIZE is"):
        names.integer_variable("WORLD_SIZE", 1)


def test_shapes_say_what_they_want() -> None:
    for value, hint, said in (
        (True, int, "a whole number"), (1 << 63, int, "a whole number"), ("1", float, "a number"),
        ([1, "a"], list[int], "a list of a whole number"), ({"a": 1}, dict[str, str], "a mapping of names to tex"),
        ([1], tuple[int, int], "a list of 2 whole numbers"), (7, str | None, "text or null"),
        ({"-1": "a"}, dict[int, str], "a mapping of whole numbers to text"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"x is .*; it must be {said}"):
            shape.expect({"x": value}, {"x": hint})
    shape.expect({"x": float("nan"), "z": [[1, 2]]}, {"x": float, "y": int | None, "z": tuple[tuple[int, int], ...]})
