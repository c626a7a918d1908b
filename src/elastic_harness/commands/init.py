"""`elastic-harness init`: writes a small training project that runs: a script, its settings, a page that says how."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from elastic_harness.errors import EXIT_SUCCESS, ConfigError, InfrastructureError

FILES = ("train.py", "config.yaml", "README.md")


def main(argv: Sequence[str]) -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(prog="elastic-harness init", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where (default: here)")
    parser.add_argument("--json", action="store_true", help="what was written, as one JSON object")
    given = parser.parse_args(list(argv))
    written = write(given.folder)
    if given.json:
        print(json.dumps({"folder": str(given.folder), "written": [str(path) for path in written]}))
        return EXIT_SUCCESS
    print("\n".join(f"{path}" for path in written))
    begin = "" if given.folder == Path() else f"cd {given.folder} && "
    print(f"next: {begin}elastic-harness launch --nproc-per-node 2 --run-dir runs/first train.py")
    return EXIT_SUCCESS


def write(folder: Path) -> list[Path]:
    """Write the project's files, none over another. Raises ConfigError if one is there already."""
    paths = [folder / name for name in FILES]
    if there := [str(path) for path in paths if path.exists()]:
        raise ConfigError(f"{', '.join(there)} exists already, and nothing was written; name another folder")
    starter = resources.files("elastic_harness.starter")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with path.open("x") as file:
                file.write((starter / path.name).read_text())
    except OSError as error:
        raise InfrastructureError(f"cannot write {error.filename}: {error.strerror}; name another folder") from error
    return paths
