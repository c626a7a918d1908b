"""Builds the documentation as a site, from the Markdown files as they lie in the repository: `make site`.

MkDocs wants its pages below one folder, and ours are where a reader of the repository finds them. So they are copied,
together with the files that they link to, into a temporary folder of the same shape. A link that leads nowhere, or to
a heading that is not there, fails the build.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mkdocs.commands import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "benchmarks/README.md")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
NESTED = re.compile(r"^  - ", re.M)  # Python-Markdown wants four blanks
AS_ON_GITHUB = {"slugify": slugify(case="lower")}
TITLE = re.compile(r"^# +(.+)$", re.M)


def pages() -> list[Path]:
    """The pages, as paths in the repository."""
    return [page.relative_to(ROOT) for pattern in PAGES for page in sorted(ROOT.glob(pattern))]


def linked(page: Path) -> Iterator[Path]:
    """The files, and folders, of the repository that a page links to."""
    for target in LINK.findall((ROOT / page).read_text()):
        path = (ROOT / page.parent / target).resolve()
        if path.exists() and path.is_relative_to(ROOT):
            yield path.relative_to(ROOT)


def stage(folder: Path) -> None:
    """Copy the pages, and what they link to. A link to a folder becomes one to its page, or to a list of its files."""
    for page in pages():
        _copy(page, folder)
        for path in linked(page):
            if (ROOT / path).is_dir():
                _list(path, folder)
            elif path.suffix != ".md":
                _copy(path, folder)
    for page in folder.rglob("*.md"):
        page.write_text(NESTED.sub("    - ", LINK.sub(partial(_of_a_file, page), page.read_text())))


def _copy(path: Path, folder: Path) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, folder / path)


def _list(path: Path, folder: Path) -> None:
    """Write the page of a folder that has none, with its files."""
    index = folder / path / "README.md"
    if (ROOT / path / "README.md").exists() or index.exists():
        return
    files = [each for each in sorted((ROOT / path).iterdir()) if each.is_file()]
    for file in files:
        _copy(file.relative_to(ROOT), folder)
    index.write_text("\n".join([f"# {path}", "", *(f"- [{file.name}]({file.name})" for file in files), ""]))


def _of_a_file(page: Path, found: re.Match[str]) -> str:
    """A link of a page; one to a folder leads to the folder's page."""
    if not (page.parent / found[1]).is_dir():
        return found[0]
    return found[0].replace(found[1], f"{found[1].rstrip('/')}/README.md", 1)


def title(page: Path) -> str:
    """The page's first heading."""
    found = TITLE.search((ROOT / page).read_text())
    return found[1] if found else page.stem


def navigation() -> list[dict[str, object]]:
    """What stands at the side: the pages in the order in which README names them, then the decisions."""
    read_on = [path for path in linked(Path("README.md")) if path.suffix == ".md"]
    order = list(dict.fromkeys([Path("README.md"), *read_on, *pages()]))
    decisions = [page for page in order if page.parent.name == "decisions"]
    nav: list[dict[str, object]] = [{title(page): str(page)} for page in order if page not in decisions]
    return [*nav, {"Decisions": [{title(page): str(page)} for page in decisions]}]


def make(out: Path) -> bool:
    """Build the site into a folder. Return whether every link leads somewhere."""
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        config = load_config(
            config_file=str(Path(__file__).with_name("mkdocs.yml")),
            docs_dir=folder,
            site_dir=str(out.resolve()),
            strict=True,
            markdown_extensions=["tables", "fenced_code", "sane_lists", {"toc": AS_ON_GITHUB}],
            nav=navigation(),
        )
        try:
            build.build(config)
        except Abort as error:
            print(f"make_site: {error.message}", file=sys.stderr)
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation as a site that needs no network.")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "build" / "site", help="default: build/site")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    out = parser.parse_args().out
    if not make(out):
        return 1
    print(f"{out}/README.html" if (out / "README.html").exists() else f"{out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
