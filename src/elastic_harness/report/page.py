"""A page that needs nothing else: one HTML file with its pictures in it. Whatever comes from a log is escaped."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence

from matplotlib.figure import Figure


def text(value: object) -> str:
    """Return a value as text that means nothing to a browser."""
    return html.escape(str(value), quote=True)


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return figures in large print, each with what it is."""
    shown = "".join(f"<div><b>{text(value)}</b><span>{text(label)}</span></div>" for value, label in values)
    return f'<div class="tiles">{shown}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The last column may be wide."""
    head = "".join(f"<th>{text(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(size: tuple[float, float], title: str, draw: Callable[[Figure], object]) -> str:
    """Return a picture. size: in inches."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(data.getvalue()).decode("ascii")
    return f'<figure><img alt="{text(title)}" src="data:image/svg+xml;base64,{encoded}"></figure>'


def page(title: str, headline: str, about: str, body: str, *, good: bool) -> str:
    """Return the whole page. `body` is HTML; the rest is text."""
    return _PAGE.format(
        title=text(title),
        style=_STYLE,
        state="good" if good else "bad",
        headline=text(headline),
        about=text(about),
        body=body,
    )


_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; background: #f8f9fa; margin: 0; }
main { max-width: 980px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 34px 0 8px; }
p.about { color: #495057; margin: 0 0 18px; }
.verdict { border-left: 7px solid; padding: 14px 18px; background: #fff; border-radius: 4px; }
.verdict.good { border-color: #2b8a3e; } .verdict.good h1 { color: #2b8a3e; }
.verdict.bad { border-color: #e03131; } .verdict.bad h1 { color: #e03131; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px;
  margin: 18px 0; }
.tiles div { background: #fff; border-radius: 4px; padding: 12px 14px; }
.tiles b { display: block; font-size: 24px; } .tiles span { color: #495057; font-size: 13px; }
ul.checks { list-style: none; padding: 0; margin: 0; background: #fff; border-radius: 4px; }
ul.checks li { padding: 9px 14px 9px 40px; position: relative; border-bottom: 1px solid #f1f3f5; }
ul.checks li::before { position: absolute; left: 14px; font-weight: bold; }
ul.checks .good::before { content: "\\2713"; color: #2b8a3e; }
ul.checks .bad::before { content: "\\2717"; color: #e03131; }
ul.checks span { color: #495057; font-size: 13.5px; overflow-wrap: anywhere; }
figure { margin: 14px 0; background: #fff; border-radius: 4px; padding: 10px; }
figure img { width: 100%; display: block; }
.scroll { overflow-x: auto; background: #fff; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 10px; border-bottom: 1px solid #f1f3f5; white-space: nowrap; }
th { color: #868e96; font-weight: 600; } td:last-child { white-space: normal; color: #495057; }
pre { background: #fff; border-radius: 4px; padding: 14px; white-space: pre-wrap; font-size: 13px; }
code { background: #e9ecef; border-radius: 3px; padding: 1px 5px; font-size: 13px; }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><main>
<div class="verdict {state}"><h1>{headline}</h1>
<p class="about">{about}</p></div>
{body}
</main></body></html>
"""
