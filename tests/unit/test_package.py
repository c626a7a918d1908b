"""What `import elastic_harness` offers, and what it costs."""

from __future__ import annotations

import ast
import graphlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grimp
import pytest

import elastic_harness
from elastic_harness import checkpoint, health, notebook, scaling
from elastic_harness.errors import ConfigError

LOOKED_FOR = {
    "start", "launch", "Config", "load_config", "CheckpointManager", "ResumableDataset", "__version__", "__doc__",
}  # fmt: skip


def test_looking_at_the_package_loads_nothing_heavy() -> None:
    program = (
        "import sys, json, elastic_harness; names = dir(elastic_harness); light = elastic_harness.launch;"
        "from elastic_harness.health import ConsistencyReport, DetectedFault, FaultDetectorConfig;"
        "from elastic_harness.scaling import GradAccumulationConfig, ScalingConfig, ScalingRule;"
        "print(json.dumps([names, [m for m in ('torch', 'numpy', 'yaml') if m in sys.modules]]))"
    )
    names, heavy = json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert set(names) >= LOOKED_FOR and heavy == []


PACKAGES = [elastic_harness, checkpoint, health, notebook, scaling]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.__name__)
def test_every_name_is_there_and_documented(package: Any) -> None:
    offered = set(package.__all__)
    assert offered <= set(dir(package)) and offered - {"__version__"} == set(package._HOMES)
    for name in offered - {"__version__"}:
        assert getattr(package, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'strat'"):
        package.strat  # noqa: B018


@pytest.mark.slow
def test_a_job_is_launched_from_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print('rank', os.environ['RANK'], *sys.argv[1:])")
    assert elastic_harness.launch([script, "--nproc-per-node", "x"], nproc_per_node=2, run_dir=tmp_path / "run") == 0
    said = capfd.readouterr().out
    assert "[w0] rank 0 --nproc-per-node x" in said and "[w1] rank 1 --nproc-per-node x" in said
    script.write_text("raise SystemExit(1)")
    assert elastic_harness.launch([script], run_dir=tmp_path / "run", fresh=True, max_restarts=0, spares=None) == 1


def test_wrong_options_are_an_error_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: --nproc=2"):
        elastic_harness.launch(["script.py"], nproc=2)
    with pytest.raises(ConfigError, match="what is to be launched"):
        elastic_harness.launch([])


@pytest.mark.slow
def test_an_interrupt_reaches_the_job_once(tmp_path: Path) -> None:
    """A Ctrl-C comes to every process of the terminal's group: the job must not take it for two."""
    script, began = tmp_path / "script.py", tmp_path / "began"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('was asked to end', flush=True), sys.exit(0)))\n"
        f"pathlib.Path({str(began)!r}).touch()\ntime.sleep(600)\n"
    )
    called = f"elastic_harness.launch([{str(script)!r}], run_dir={str(tmp_path / 'run')!r})"
    command = [sys.executable, "-c", f"import elastic_harness, sys; sys.exit({called})"]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not began.exists():
        assert caller.poll() is None
        time.sleep(0.01)
    caller.send_signal(signal.SIGINT)
    said, _ = caller.communicate(timeout=60)
    assert caller.returncode == 130 and "was asked to end" in said, said


def test_a_public_class_name_stands_once() -> None:
    """Whoever reads a name finds one class of it."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(elastic_harness.__path__[0]).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.name)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_import_goes_in_a_circle() -> None:
    """Those for types alone count too."""
    graph = grimp.build_graph("elastic_harness", exclude_type_checking_imports=False)
    graphlib.TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()
