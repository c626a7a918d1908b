"""The demo's report: one HTML file that needs nothing else, and one PNG. Needs matplotlib."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from elastic_harness.demo.verdict import DemoOutcome
from elastic_harness.report import plots
from elastic_harness.report.page import page as whole_page
from elastic_harness.report.page import picture, table, text, tiles
from elastic_harness.report.terminal import stages_text
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

    runs = ((storm, plots.STORM, "with kills"), (calm, plots.CALM, "undisturbed"))
    pictures = [
        picture((9.6, 4.2), "Loss of both runs, and their difference", losses),
        picture(
            (9.6, 3.6),
            "Worker processes over time",
            lambda f: plots.draw_timeline(f.subplots(), storm, kills, "SIGKILL"),
        ),
        picture(
            (9.6, 1.6 + 0.5 * len(kills)),
            "Stages of every recovery",
            lambda f: plots.draw_recoveries(f.subplots(), storm, kills, page.healthy_ms, "kill"),
        ),
        picture((9.6, 2.8), "Tokens per second", lambda f: plots.draw_speed(f.subplots(), runs, kills, "kill")),
    ]
    checks = "".join(
        f'<li class="{"good" if check.holds else "bad"}"><b>{text(check.claim)}</b><br>'
        f"<span>{text(check.evidence)}</span></li>"
        for check in page.outcome.checks
    )
    about = (
        "One training, run twice: once while workers were killed with SIGKILL at random moments "
        f"(seed {page.seed}), once undisturbed on another number of workers."
    )
    heads = ("at", "who", "pid", "in step", "noticed after", "group again after", "next commit after", "stages, ms")
    body = _BODY.format(
        tiles=tiles(_tiles(page)),
        checks=checks,
        pictures="\n".join(pictures),
        kills=table(heads, (_kill_row(storm, kill) for kill in kills)),
        sample=text(page.sample),
        seed=page.seed,
        storm_dir=text(page.storm_dir),
        calm_dir=text(page.calm_dir),
    )
    return whole_page("elastic-harness demo", page.headline, about, body, good=page.outcome.ok)


def _tiles(page: Page) -> list[tuple[str, str]]:
    after = [value for value in (page.storm.after_ms(kill.t) for kill in page.kills) if value is not None]
    groups = [sum(stages.values()) for stages in (page.storm.stages_after(kill.t) for kill in page.kills) if stages]
    return [
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


def _kill_row(story: Story, kill: Kill) -> tuple[str, ...]:
    stages, after = story.stages_after(kill.t), story.after_ms(kill.t)
    seen = [story.noticed[member] for member in kill.members if member in story.noticed]
    return (
        f"{kill.t - (story.started or kill.t):.1f} s",
        kill.label + (" (by hand)" if kill.by == "key" else ""),
        ", ".join(str(pid) for pid in kill.pids),
        str(kill.step),
        f"{1000 * (max(seen) - kill.t):.0f} ms" if seen else "not noticed",
        f"{sum(stages.values()):.0f} ms" if stages else "–",
        f"{after:.0f} ms" if after is not None else "–",
        stages_text(stages),
    )


_BODY = """{tiles}
<ul class="checks">{checks}</ul>
<h2>What happened</h2>
{pictures}
<h2>Every kill</h2>
{kills}
<h2>Text from the trained model</h2>
<pre>{sample}</pre>
<h2>Look for yourself</h2>
<p><code>elastic-harness explain {storm_dir}</code> tells what was noticed, by its codes.<br>
<code>elastic-harness verify {storm_dir}</code><br><code>elastic-harness verify {calm_dir}</code><br>
<code>elastic-harness demo --seed {seed}</code> plans the same strikes again.</p>"""
