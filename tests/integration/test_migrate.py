"""The programs of docs/migrate.md. What it says to write trains the same however it is started, and what it begins from
is Python that the library of its name takes, as far as that is installed."""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path

import pytest

from integration.launch_tools import left_behind
from integration.script_tools import forked, launch, said
from integration.test_modes import finished

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
PROGRAMS = {
    block.partition("\n")[0].removeprefix("# "): block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_program_has_a_name_and_is_python() -> None:
    assert len(PROGRAMS) == 7
    for name, program in PROGRAMS.items():
        assert name.endswith(".py")
        compile(program, name, "exec")


def test_what_it_becomes_trains_the_same_however_it_is_started(folder: Path) -> None:
    alone = forked(folder / "after.py")
    assert alone.returncode == 0 and "step 40  loss" in alone.stdout, said(alone)
    launched = launch(folder / "run", folder / "after.py", options=("--nproc-per-node", 2))
    assert launched.returncode == 0, said(launched)
    assert not left_behind(folder / "run")
    (own,) = (folder / "runs").iterdir()
    assert finished(folder / "run")["weights_sha256"] == finished(own)["weights_sha256"]


def test_the_program_for_torchrun_runs(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ended = forked(folder / "torchrun_before.py", **alone)
    assert ended.returncode == 0 and (folder / "checkpoint.pt").exists(), said(ended)


@pytest.mark.parametrize(
    ("library", "program"),
    [
        ("accelerate", "accelerate_before.py"),
        ("pytorch_lightning", "lightning_before.py"),
        ("pytorch_lightning", "lightning_after.py"),
    ],
)
def test_the_programs_for_other_libraries_run(folder: Path, library: str, program: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed, and the harness does not need it")
    ended = forked(folder / program)
    assert ended.returncode == 0, said(ended)
