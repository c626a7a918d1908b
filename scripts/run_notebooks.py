"""Runs the notebooks, and writes their outputs into them.

    python scripts/run_notebooks.py                              all three, in place
    python scripts/run_notebooks.py 1_basic --set STEPS=20       one, with other parameters

Each notebook has a cell that is tagged "parameters"; what --set gives is assigned after it. A notebook runs in a
temporary folder. An output that names a place on this machine is an error, because it would be published.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
CELL_TIMEOUT_S = 3600
PLACE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|Users|mnt|opt|usr|var|srv|content)/[\w./@-]+")


def main(argv: list[str] | None = None) -> int:
    """Run notebooks, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="without .ipynb (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter, in Python")
    given = parser.parse_args(argv)
    names = given.names or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
            notebook = execute(FOLDER / f"{name}.ipynb", Path(folder), given.set)
        named = sorted(set(places(notebook)))
        if named:
            print(f"{name}: its outputs name places on this machine: {named}", file=sys.stderr)
            return 1
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: written")
    return 0


def execute(path: Path, folder: Path, parameters: list[str]) -> nbformat.NotebookNode:
    """Run a notebook in a folder, and return it with its outputs. Raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    source, (at,) = notebook.cells, _tagged(notebook)
    own = source[at].source
    source[at].source = "\n".join([own, *parameters])
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
    )
    client.execute()
    source[at].source = own
    notebook.metadata["language_info"] = {"name": "python"}  # the version is that of whoever opens it
    return notebook


def _tagged(notebook: nbformat.NotebookNode) -> list[int]:
    return [n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]


def texts(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Yield all text in the outputs, pictures included."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (str(value) for value in output.get("data", {}).values())
            yield from output.get("traceback", [])


def places(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the absolute paths that its outputs name."""
    return [found for text in texts(notebook) for found in PLACE.findall(text)]


if __name__ == "__main__":
    sys.exit(main())
