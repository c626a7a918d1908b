"""The demo's report: one HTML file that needs nothing else, and one PNG. Needs matplotlib."""

from __future__ import annotations

import base64
import html
import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from elastic_harness.demo import plots
from elastic_harness.demo.screen import stages_text
from elastic_harness.demo.verdict import DemoOutcome
from elastic_harness.runs.story import Kill, Story

HTML_NAME, PNG_NAME = "report.html", "report.png"


@dataclass(frozen=True)
class Page:
    """Everything the report shows."""

    storm: Story
    calm: Story
    kills: tuple[Kill, ...]
    outcome: DemoOutcome
    seed: int
    sample: str
    storm_dir: Path
    calm_dir: Path

    @property
    def headline(self) -> str:
        killed = sum(len(kill.members) for kill in self.kills)
        if self.outcome.ok:
            return f"{killed} workers killed, nothing lost: the weights are identical bit for bit"
        failed = next((check.claim for check in self.outcome.checks if not check.holds), "no check was made")
        return f"the verdict does NOT hold: {failed}"

    @property
    def healthy_ms(self) -> float:
        """The median step of the disturbed run, among steps that no kill touched."""
        struck = {kill.step for kill in self.kills}
        quiet = [commit.step_s for step, commit in self.storm.commits.items() if step not in struck and step > 0]
        return 1000 * statistics.median(quiet) if quiet else 0.0


def write(page: Page, folder: Path) -> tuple[Path, Path]:
    """Write report.html and report.png into `folder`; returns their paths."""
    html_path, png_path = folder / HTML_NAME, folder / PNG_NAME
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.overview(page.storm, page.calm, page.kills, page.healthy_ms, page.headline, page.outcome.ok)
        figure.savefig(png_path, dpi=110, facecolor="white")
        html_path.write_text(render(page), encoding="utf-8")
    return html_path, png_path


def render(page: Page) -> str:
    """The whole page as one string; it loads nothing from anywhere."""
    kills, storm, calm = page.kills, page.storm, page.calm

    def losses(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, height_ratios=(3.4, 1))
        plots.draw_losses(top, bottom, storm, calm, kills)

    pictures = [
        _picture((9.6, 4.2), "Loss of both runs, and their difference", losses),
        _picture(
            (9.6, 3.6),
            "Worker processes over time",
            lambda f: plots.draw_timeline(f.subplots(), storm, kills),
        ),
        _picture(
            (9.6, 1.6 + 0.5 * len(kills)),
            "Stages of every recovery",
            lambda f: plots.draw_recoveries(f.subplots(), storm, kills, page.healthy_ms),
        ),
        _picture((9.6, 2.8), "Tokens per second", lambda f: plots.draw_speed(f.subplots(), storm, calm, kills)),
    ]
    checks = "".join(
        f'<li class="{"good" if check.holds else "bad"}"><b>{_text(check.claim)}</b><br>'
        f"<span>{_text(check.evidence)}</span></li>"
        for check in page.outcome.checks
    )
    return _PAGE.format(
        style=_STYLE,
        state="good" if page.outcome.ok else "bad",
        headline=_text(page.headline),
        tiles=_tiles(page),
        checks=checks,
        pictures="\n".join(pictures),
        rows="".join(_kill_row(storm, kill) for kill in kills),
        sample=_text(page.sample),
        seed=page.seed,
        storm_dir=_text(str(page.storm_dir)),
        calm_dir=_text(str(page.calm_dir)),
    )


def _tiles(page: Page) -> str:
    after = [value for value in (page.storm.after_kill_ms(kill) for kill in page.kills) if value is not None]
    groups = [sum(stages.values()) for stages in (page.storm.stages_after(kill) for kill in page.kills) if stages]
    tiles = [
        (str(len(page.storm.commits)), "steps committed, each with its full batch"),
        (str(sum(len(kill.members) for kill in page.kills)), f"workers killed, in {len(page.kills)} strikes"),
        (
            f"{statistics.median(groups):.0f} ms" if groups else "–",
            "median from a kill to a working group",
        ),
        (
            f"{statistics.median(after):.0f} ms" if after else "–",
            "median from a kill to the next committed step",
        ),
        (f"{page.healthy_ms:.0f} ms", "a healthy step, median"),
    ]
    return "".join(f"<div><b>{_text(value)}</b><span>{_text(label)}</span></div>" for value, label in tiles)


def _kill_row(story: Story, kill: Kill) -> str:
    stages, after = story.stages_after(kill), story.after_kill_ms(kill)
    seen = [story.noticed[member] for member in kill.members if member in story.noticed]
    cells = (
        f"{kill.t - (story.started or kill.t):.1f} s",
        kill.label + (" (by hand)" if kill.by == "key" else ""),
        ", ".join(str(pid) for pid in kill.pids),
        str(kill.step),
        f"{1000 * (max(seen) - kill.t):.0f} ms" if seen else "not noticed",
        f"{sum(stages.values()):.0f} ms" if stages else "–",
        f"{after:.0f} ms" if after is not None else "–",
        stages_text(stages),
    )
    return "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"


def _picture(size: tuple[float, float], title: str, draw: Callable[[Figure], None]) -> str:
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(data.getvalue()).decode("ascii")
    return f'<figure><img alt="{_text(title)}" src="data:image/svg+xml;base64,{encoded}"></figure>'


def _text(value: str) -> str:
    return html.escape(value, quote=True)


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
<title>elastic-harness demo</title><style>{style}</style></head><body><main>
<div class="verdict {state}"><h1>{headline}</h1>
<p class="about">One training, run twice: once while workers were killed with SIGKILL at random moments
(seed {seed}), once undisturbed on another number of workers.</p></div>
<div class="tiles">{tiles}</div>
<ul class="checks">{checks}</ul>
<h2>What happened</h2>
{pictures}
<h2>Every kill</h2>
<div class="scroll"><table><thead><tr>
<th>at</th><th>who</th><th>pid</th><th>in step</th><th>noticed after</th>
<th>group again after</th><th>next commit after</th><th>stages, ms</th></tr></thead><tbody>{rows}</tbody></table></div>
<h2>Text from the trained model</h2>
<pre>{sample}</pre>
<h2>Look for yourself</h2>
<p><code>elastic-harness verify {storm_dir}</code><br><code>elastic-harness verify {calm_dir}</code><br>
<code>elastic-harness demo --seed {seed}</code> plans the same strikes again.</p>
</main></body></html>
"""
