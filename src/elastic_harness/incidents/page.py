"""The page about all codes, docs/TROUBLESHOOTING.md. It is written by `make docs` and never by hand."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_harness.incidents.code import FAMILIES, Code
from elastic_harness.incidents.places import PLACES
from elastic_harness.incidents.table import TABLE

_AGAIN = {"yes": "yes", "no": "no, not before something is changed", "unknown": "not known"}
_HEAD = """\
<!-- Made from src/elastic_harness/incidents/ (table.py, places.py) by `make docs`. Change those, not this page. -->

# Troubleshooting

Each failure has a code. The codes are in the incidents on the screen, in `events.jsonl` (`code`), and here. They never
change.

```
elastic-harness explain RUN        # the story of a run: the first cause first, what was done, what it cost
elastic-harness explain EH-W101    # one code, offline
elastic-harness explain FILE       # a log, an event log, or the file with the stacks of a hang
elastic-harness explain --list     # all codes
```

**Domain** says whose matter it is: *workload* (script, data, settings), *infrastructure* (machine, network, storage,
and who operates them), or *unknown*, if the evidence fits both. **Again** says whether it would do to try the same
again with nothing changed. In the commands below RUN is a run folder or an id below `runs/`, and WORKER a member such
as `w1-2`.
"""


def troubleshooting() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_by_symptom(), *_by_place(), *_by_exit_code(), *_all_codes()])


def explained(code: Code) -> list[tuple[str, list[str]]]:
    """Return what there is to say about a code, by heading."""
    ends = [] if code.exit_code is None else [f"a run that ends by it has exit code {code.exit_code}"]
    return [
        ("you see", [code.symptom]),
        ("it means", [code.meaning]),
        ("domain", [code.domain]),
        ("evidence", [code.evidence]),
        ("inferred", [code.inferred]),
        ("done", [code.done, *ends]),
        ("again", [_AGAIN[code.retry]]),
    ]


def _by_symptom() -> Iterator[str]:
    yield "## By what you see\n"
    for letter, title in FAMILIES.items():
        yield f"**{title}**\n"
        yield "| You see | Code | First |\n|---|---|---|"
        for code in _family(letter):
            named = f"[{code.id}](#{_anchor(code)}) {code.name}"
            yield f"| {_cell(code.symptom)} | {named} | {_cell(code.what_next()[0])} |"
        yield ""


def _by_place() -> Iterator[str]:
    yield "## By where you are\n"
    yield "What has no code, because it happens outside a run, or belongs to the place where it is.\n"
    for place, troubles in PLACES.items():
        yield f"### {place}\n"
        yield "| You see | Because | Do |\n|---|---|---|"
        yield from (f"| {' | '.join(map(_cell, trouble))} |" for trouble in troubles)
        yield ""


def _by_exit_code() -> Iterator[str]:
    yield "## By exit code\n"
    yield "The story of the run has the one that it was: `elastic-harness explain RUN`.\n"
    yield "| Exit code | Codes |\n|--:|---|"
    for number in sorted({code.exit_code for code in TABLE.values() if code.exit_code is not None}):
        ending = [f"[{c.id}](#{_anchor(c)}) {c.name}" for c in TABLE.values() if c.exit_code == number]
        yield f"| {number} | {', '.join(ending)} |"
    yield ""


def _all_codes() -> Iterator[str]:
    yield "## All codes\n"
    for letter, title in FAMILIES.items():
        yield f"### {title}\n"
        for code in _family(letter):
            yield f"#### {code.id} {code.name}\n"
            for heading, said in explained(code):
                yield f"- **{heading}:** {'; '.join(said)}"
            yield "- **next:**"
            yield from (f"  - {sentence}" for sentence in code.what_next())
            yield ""


def _family(letter: str) -> list[Code]:
    return [code for code in TABLE.values() if code.family == letter]


def _anchor(code: Code) -> str:
    """Return the anchor that a viewer makes of the code's heading."""
    kept = "".join(c for c in f"{code.id} {code.name}".lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
