"""The notebooks run from their first cell to the last, with smaller models and fewer steps. They assert themselves what
they prove."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from scripts.run_notebooks import FOLDER, execute, places, texts

from integration.launch_tools import SOURCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of Jupyter's own libraries
]
SMALL = {
    "1_basic": [
        "STEPS, WORKERS, WIDTH, LAYERS = 16, 2, 32, 1",
        "KILLS, STOP_AT = [(4, [1]), (7, [0])], 11",
    ],
    "2_large": [
        "STEPS, LAYERS, WIDTH, HEADS = 9, 1, 32, 4",
        "BATCH, MICRO, SEQ, CHARACTERS = 4, 1, 32, 8",
        "CURVE_TOKENS, CURVE_SEQ, CURVE_BATCH = 12800, 32, 16",
    ],
    "3_gpt2_finetune": ["STEPS, WORKERS, SEQ = 12, 2, 32", "KILLS = [(0.25, 0)]"],
}
SAYS = {
    "1_basic": ["The weights are equal bit for bit", "EXACT  runs/basic-storm", "killed w"],
    "2_large": ["EXACT  runs/large", "× the constant batch", "so WikiText-2 cannot be had"],
    "3_gpt2_finetune": ["EXACT  runs/gpt2", "killed w", "A small GPT-2 with new weights takes its place"],
}


def test_every_notebook_is_run() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "3_gpt2_finetune" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'elastic-harness[notebook]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a test loads nothing from a hub, even where it could
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    notebook = execute(FOLDER / f"{name}.ipynb", tmp_path, SMALL[name])
    shown = "\n".join(texts(notebook))
    assert [said for said in SAYS[name] if said not in shown] == []


def test_places_on_a_machine_are_found() -> None:
    import nbformat

    cell = nbformat.v4.new_code_cell(
        outputs=[nbformat.v4.new_output("stream", text="in /home/me/x.py, runs/a, a/tmp/b\n")]
    )
    assert places(nbformat.v4.new_notebook(cells=[cell])) == ["/home/me/x.py"]
