"""What is committed in notebooks/ can be published: whole outputs of a real run, small, without places of a machine."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import nbformat
import pytest
from scripts.run_notebooks import FOLDER, places, texts

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_can_be_published(path: Path) -> None:
    assert path.stat().st_size < 500_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run once, in order"
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert places(notebook) == []
    shown = "\n".join(texts(notebook))
    assert "EXACT  runs/" in shown and shown.count("<svg") >= 1 and ": finished" in shown
    assert len([cell for cell in code if cell.outputs]) >= len(code) - 4, "cells without output only define"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_where_it_opens_and_what_it_needs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    first, install = notebook.cells[:2]
    badge = re.search(
        r"\]\(https://colab\.research\.google\.com/github/([\w-]+/[\w-]+)/blob/main/(\S+)\)", first.source
    )
    assert badge is not None and badge[2] == f"notebooks/{path.name}"
    assert f"elastic-harness[notebook] @ git+https://github.com/{badge[1]}" in install.source
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1
    for link in re.findall(
        r"\]\((?!https?:)([^)#]+)", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    ):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("package", ["ipywidgets", "matplotlib", "transformers"])
def test_what_notebooks_need_brings_no_torch_of_its_own(package: str) -> None:
    """Another torch than that of constraints.txt could not run what was recorded."""
    asked = [line for line in importlib.metadata.requires(package) or [] if "extra ==" not in line]
    assert asked and not [line for line in asked if re.match(r"torch\b", line)]
