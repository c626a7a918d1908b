"""What a worker tells of a recovery."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_harness.config import Config
from elastic_harness.contract.messages import LogEvent
from elastic_harness.membership.types import Digest, Generation, Source, SourceKind
from elastic_harness.train.progress import Formed, Progress
from elastic_harness.train.tell import tell_recovery

MEMBERS = ("a/w0", "a/w1", "b/w2")


def told(folder: Path, member: str, kind: SourceKind, version: int, from_step: int = 0) -> list[str]:
    sent: list[Any] = []
    sources = {each: Source("keep") for each in MEMBERS} | {member: Source(kind)}
    digest = Digest(2, version, 0, from_step, sources)
    formed = Formed(Generation(2, MEMBERS, True, "1 lost"), digest, MEMBERS.index(member), None)
    link = SimpleNamespace(member=member, send=sent.append)
    engine: Any = SimpleNamespace(
        link=link, config=Config(), run_dir=folder, configured={"seed": 1}, omissions=()
    )
    tell_recovery(engine, Progress(version, formed=formed), 0.0, {}, planned=False)
    return [message.event for message in sent if isinstance(message, LogEvent)]


@pytest.mark.parametrize(
    ("member", "kind", "version", "from_step", "tells"),
    [
        ("a/w0", "init", 0, 0, True),
        ("a/w1", "state", 0, 0, False),  # the first of its node does
        ("b/w2", "state", 0, 0, True),
        ("b/w2", "keep", 0, 0, True),  # the one that has begun the run may be dead, and its agent with it
        ("b/w2", "keep", 1, 0, False),
        ("a/w0", "restore", 20, 20, True),
        ("b/w2", "state", 25, 20, False),
    ],
)
def test_what_a_run_is_made_of_is_told_until_a_step_is_committed(
    tmp_path: Path, member: str, kind: SourceKind, version: int, from_step: int, tells: bool
) -> None:
    events = told(tmp_path, member, kind, version, from_step)
    assert ("run_configured" in events) == tells == (tmp_path / "config.yaml").exists()
    assert ("recovery" in events) == (member != "a/w1")
    assert ("worker_joined" in events) == (kind != "keep")
