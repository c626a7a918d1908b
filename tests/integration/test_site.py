"""The documentation builds as a site, and a link that leads nowhere fails the build."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / "scripts" / "make_site.py", out], capture_output=True, text=True, check=False
    )


def test_every_link_of_the_documentation_leads_somewhere(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "docs" / "exactness.html").exists()
    assert "https://fonts." not in (tmp_path / "site" / "index.html").read_text(), "it needs no network"


def test_dead_links_are_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# A page\n")
    dead = ("docs/gone.md", "docs/page.md#gone", "src/gone.py")
    links = ", ".join(f"[dead]({link})" for link in dead)
    (tmp_path / "README.md").write_text(f"# Made up\n\n[a page](docs/page.md), {links}\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1 and all(link in built.stderr for link in dead), built.stderr
