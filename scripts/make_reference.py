"""Writes what is made from the code itself: configs/training_config.yaml, docs/API_REFERENCE.md, docs/metrics.md and
monitoring/.

    python scripts/make_reference.py            write all (make reference)
    python scripts/make_reference.py --check    exit with 1 if one of them is not what the code says

Settings are explained by the comments beside their fields, names by their docstrings, metrics by their table. A test
checks that all files are up to date.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from elastic_harness import shape
from elastic_harness.gpt.config import TrainerConfig
from elastic_harness.metrics import alerts, grafana
from elastic_harness.metrics.page import metrics_page
from elastic_harness.setting_aliases import ALIASES
from elastic_harness.typed import Section, plain, section_class

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "configs" / "training_config.yaml"
API = ROOT / "docs" / "API_REFERENCE.md"
METRICS = ROOT / "docs" / "metrics.md"
RULES = ROOT / "monitoring" / "prometheus-rules.yaml"
DASHBOARD = ROOT / "monitoring" / "grafana-dashboard.json"
WIDTH = 120
MODULES = {  # what users import, and which names of it where the module does not say so itself
    "elastic_harness": (),
    "elastic_harness.policies": ("Apply", "GoBack", "Halt", "Skip", "StepFacts", "UpdatePolicy"),
    "elastic_harness.train.run": ("Run", "Step"),
    "elastic_harness.checkpoint": (),
    "elastic_harness.data": (),
    "elastic_harness.scaling": (),
    "elastic_harness.health": (),
    "elastic_harness.notebook": (),
    "elastic_harness.planning": (
        "calculate_failure_probability", "young_interval_s", "daly_interval_s", "available_interval_s", "restarting",
        "strategies", "bill", "Nodes", "FailureCosts", "TimeShares", "Strategy", "Bill",
    ),
    "elastic_harness.runs.verify": ("verify", "Verdict"),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(argv)
    stale = [path for path, text in made().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not given.check:
            path.write_text(made()[path])
        print(f"{path.relative_to(ROOT)} {'is not up to date: run make reference' if given.check else 'written'}")
    return int(given.check and bool(stale))


def made() -> dict[Path, str]:
    """Return what each file has to hold."""
    return {
        SETTINGS: settings(TrainerConfig),
        API: api(),
        METRICS: metrics_page(),
        RULES: alerts.rules(),
        DASHBOARD: grafana.dashboard(),
    }


# ---- the settings


def settings(config: type[Section]) -> str:
    """Return a YAML file with every setting, its default, its type and what it is for."""
    lines = [
        "# Every setting with its default, what it is for and what it may be. Copy what you change into a file of your",
        "# own. `training`, `elastic`, `checkpoint`, `health` and `scaling` are for any script that calls",
        "# elastic_harness.start(), the other sections for the built-in trainer. On a command line: section.key=value.",
        "",
    ]
    for name, hint in shape.of(config).items():
        section = section_class(hint)
        if section is None:
            default = getattr(config(), name)
            lines += [*_comment("", _notes(config).get(name, ""), hint), f"{name}: {_yaml(default)}", ""]
            continue
        lines += textwrap.wrap(first_line(section), WIDTH - 2, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"{name}:")
        notes = _notes(section)
        for field in dataclasses.fields(section):  # type: ignore[arg-type]
            kind = shape.of(section)[field.name]
            lines += [
                *_comment("  ", notes.get(field.name, ""), kind, also_known_as(f"{name}.{field.name}")),
                f"  {field.name}: {_yaml(_default(field))}",
            ]
        lines.append("")
    return "\n".join(lines)


def _comment(indent: str, note: str, hint: Any, also: Sequence[str] = ()) -> list[str]:
    kind = shape.described(hint).replace("one of auto", "auto")
    told = f"{note} ({kind})" if note else f"({kind})"
    if also:
        told += f"; also {', '.join(also)}"
    start = f"{indent}# "
    return textwrap.wrap(told, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def also_known_as(key: str) -> list[str]:
    return [alias for alias, canonical in ALIASES.items() if canonical == key]


def _default(field: dataclasses.Field[Any]) -> Any:
    made_anew = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made_anew else field.default  # type: ignore[misc]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(plain(value), default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def _notes(section: type) -> dict[str, str]:
    """Return the comments beside a section's fields, and those in lines of their own before a field."""
    notes: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            notes |= _comments(inspect.getsource(base))
    return notes


def _comments(source: str) -> dict[str, str]:
    lines = textwrap.dedent(source).splitlines()
    beside: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        if token.type == tokenize.COMMENT:
            beside[token.start[0]] = token.string.removeprefix("#").strip()
    notes, before = dict[str, str](), list[str]()
    for number, line in enumerate(lines, 1):
        field = re.match(r"    (\w+): [^=]+(=|#|$)", line)
        if line.strip().startswith("#"):
            before.append(beside[number])
        elif field:
            notes[field[1]] = " ".join([*before, beside.get(number, "")]).strip()
            before = []
        else:
            before = []
    return notes


# ---- the API


def api() -> str:
    """Return the page of all public names, from their docstrings."""
    lines = [
        "# API reference",
        "",
        "Made from the docstrings by `make reference`. The settings are in",
        "[configs/training_config.yaml](../configs/training_config.yaml),",
        "the commands in the [page about them](running.md).",
        "",
    ]
    home: dict[Any, str] = {}
    for module_name, names in MODULES.items():
        module = importlib.import_module(module_name)
        listed = names or tuple(name for name in module.__all__ if not name.startswith("__"))
        lines += [f"## {module_name}", "", paragraph(module.__doc__), ""]
        again = {name: home[value] for name in listed if (value := getattr(module, name)) in home}
        if again:
            places = ", ".join(f"`{name}` (in {place})" for name, place in again.items())
            lines += [f"Described above: {places}.", ""]
        for name in listed:
            if name not in again:
                home[getattr(module, name)] = module_name
                lines += described(name, getattr(module, name))
    return "\n".join(lines).rstrip() + "\n"


def described(name: str, value: Any) -> Iterator[str]:
    """Yield the lines about a class or function."""
    yield f"### {name}"
    yield ""
    kind = inspect.isclass(value)
    settings_only = kind and issubclass(value, Section)
    if not settings_only and not (kind and issubclass(value, BaseException)):
        yield from block(f"{'class ' * kind}{name}{_signature(value)}")
    yield text_of(value)
    yield ""
    if not kind or settings_only:
        return
    yield from fields_of(value)
    for member_name, member in vars(value).items():
        if member_name.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            yield f"**{member_name}** (property): {one_line(inspect.getdoc(member) or '')}"
            yield ""
        elif inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod)):
            bound = getattr(value, member_name)
            yield f"**{member_name}**{escaped(_signature(bound))}: {one_line(inspect.getdoc(bound) or '')}"
            yield ""


def fields_of(value: type) -> Iterator[str]:
    """Yield a table of the fields that have a comment."""
    notes = _notes(value) if dataclasses.is_dataclass(value) else {}
    told = {name: note for name, note in notes.items() if note and not name.startswith("_")}
    if told:
        yield from (
            "| Field | |",
            "|---|---|",
            *(f"| `{name}` | {note.replace('|', chr(92) + '|')} |" for name, note in told.items()),
            "",
        )


def block(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - 4, subsequent_indent="    ", break_on_hyphens=False)
    return ["```python", *wrapped, "```", ""]


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "()"
    if getattr(value, "_is_protocol", False):
        return "(Protocol)"
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text.replace("<factory>", "…"))
    text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return re.sub(r"\((self|cls)(, )?", "(", text, count=1)


def text_of(value: Any) -> str:
    """Return a docstring as Markdown: indented lines are a block."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}("):
        return ""  # what the dataclass has made up
    return paragraph(text)


def paragraph(text: str | None) -> str:
    parts = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    found = []
    for part in parts:
        indented = all(line.startswith("    ") for line in part.splitlines())
        found.append(f"```\n{textwrap.dedent(part)}\n```" if indented and part else " ".join(part.split()))
    return "\n\n".join(found).replace("```\n\n```\n", "\n")


def one_line(text: str) -> str:
    return " ".join(text.split())


def first_line(value: type) -> str:
    return one_line((inspect.getdoc(value) or "").split("\n\n")[0])


def escaped(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    sys.exit(main())
