"""`elastic-harness demo`: train while workers are killed, train again undisturbed, then the verdict."""

from __future__ import annotations

import argparse
import json
import math
import random
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from elastic_harness.config import load_config
from elastic_harness.demo.keys import Keys
from elastic_harness.demo.plan import Strike, choose_victims, plan_strikes
from elastic_harness.demo.screen import Screen
from elastic_harness.demo.verdict import DemoOutcome, compare
from elastic_harness.errors import (
    EXIT_INTERRUPTED,
    EXIT_SUCCESS,
    ConfigError,
    HarnessError,
    InfrastructureError,
)
from elastic_harness.gpt.config import TrainerConfig
from elastic_harness.runs.story import Story
from elastic_harness.watched_job import Job, Terminated, cli, signals_as_exceptions

EXIT_VERDICT_FAILED = 1
POLL_S = 0.02
STEPS_FOR_A_STRIKE = 4
PROMPT = "def "
SAMPLE_TOKENS = 240
KEY_HELP = "k kill a random worker   0-9 kill that rank   a add a worker   q quit"


class Quit(Exception):
    """The user pressed q."""


@dataclass(frozen=True)
class Settings:
    """What the command line fixed."""

    seed: int
    config: Path
    overrides: tuple[str, ...]
    storm_dir: Path
    calm_dir: Path
    workers: int
    spares: int
    kills: int
    calm_workers: int
    max_steps: int
    plain: bool
    as_json: bool


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if the verdict holds, 1 if not, 130 if it was interrupted."""
    console = Console()
    try:
        settings = _settings(argv)
        console = Console(stderr=settings.as_json)
        with signals_as_exceptions():
            return _run(settings, console)
    except HarnessError as error:
        Console(stderr=True).print(Text(f"elastic-harness demo: {error}", style="red"))
        return error.exit_code
    except Quit:
        console.print("stopped; nothing is left running")
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left running")
        return EXIT_INTERRUPTED
    except Terminated as stop:
        return stop.exit_code


def _run(settings: Settings, console: Console) -> int:
    began = time.time()
    console.print(
        f"[bold]elastic-harness demo[/bold]  seed {settings.seed}  "
        f"(repeat with --seed {settings.seed})\n"
        f"{settings.workers} workers and {settings.spares} spare train {settings.max_steps} steps; "
        f"{settings.kills} times some of them are killed. "
        f"Then {settings.calm_workers} workers train the same, undisturbed.",
        highlight=False,
    )
    storm = _train(settings, console, f"run 1 of 2: {settings.workers} workers, with kills", settings.storm_dir, True)
    calm = _train(
        settings,
        console,
        f"run 2 of 2: {settings.calm_workers} workers, undisturbed",
        settings.calm_dir,
        False,
    )
    outcome = compare(settings.storm_dir, storm.story, settings.calm_dir, calm.story)
    sample = _sample_text(settings.storm_dir, console)
    _save_facts(settings, storm, outcome)
    report = _write_report(settings, console, storm, calm, outcome, sample)
    elapsed_s = time.time() - began
    _print_verdict(console, outcome, report, sample, elapsed_s)
    if settings.as_json:
        facts = {**_facts(settings, storm, outcome), "report": [str(path) for path in report], "sample": sample}
        print(json.dumps({**facts, "seconds": elapsed_s}))
    return EXIT_SUCCESS if outcome.ok else EXIT_VERDICT_FAILED


def _train(settings: Settings, console: Console, title: str, run_dir: Path, storm: bool) -> Job:
    """Launch one run and watch it to its end; raises if it does not end well."""
    workers, spares = (settings.workers, settings.spares) if storm else (settings.calm_workers, 0)
    command = cli(
        "launch", "--standalone", f"--nproc-per-node={workers}", f"--spares={spares}", f"--run-dir={run_dir}",
        "-m", "elastic_harness.train", "--config", str(settings.config), *settings.overrides,
    )  # fmt: skip
    strikes = plan_strikes(settings.seed, settings.max_steps, settings.kills) if storm else []
    with tempfile.TemporaryDirectory(prefix="elastic-demo-") as scratch, Keys() as keys:
        output = Path(scratch) / "launch.log"
        help_line = "" if not keys.available else KEY_HELP if storm else "q quit"
        with (
            Job(command, run_dir, output, settings.max_steps, workers) as job,
            Screen(console, title, settings.plain, help_line) as screen,
        ):
            try:
                _watch(job, screen, keys, strikes, random.Random(f"victims {settings.seed}"), storm)
            finally:
                job.stop()
                if (run_dir / "logs").is_dir():
                    shutil.copyfile(output, run_dir / "logs" / "launch.log")
            if job.exit_code != 0 or job.story.finished is None:
                raise InfrastructureError(
                    f"the launch command ended with exit code {job.exit_code} at step "
                    f"{job.story.running_step} of "
                    f"{settings.max_steps}; the last it said:\n{job.output_tail()}\nall logs are in "
                    f"{run_dir}/logs"
                )
    return job


def _watch(job: Job, screen: Screen, keys: Keys, strikes: Sequence[Strike], draw: random.Random, storm: bool) -> None:
    """Follow the job until it ends, killing as planned and as keys say."""
    pending = list(strikes)
    while job.advance():
        if pending and time.time() >= moment(job.story, pending, len(strikes), job.workers):
            victims = choose_victims(pending[0].what, _living_ranks(job), draw)
            if victims:
                _strike(job, screen, victims, "plan")
                pending.pop(0)
        _obey(keys.pressed(), job, screen, draw, storm)
        screen.update(job.story, job.kills)
        time.sleep(POLL_S)
    job.advance()
    screen.update(job.story, job.kills, last=True)
    if pending:
        screen.line(f"{len(pending)} of {len(strikes)} planned kills did not happen: the run ended before their moment")


def moment(story: Story, pending: Sequence[Strike], planned: int, workers: int) -> float:
    """When the next strike is due: at its phase of a step, as soon as its step is reached and everybody is up.

    It waits for the replacements of those killed before it, but not so long that the run could end first.
    """
    strike, last = pending[0], story.last
    if last is None or story.running_step < strike.step:
        return math.inf
    latest = min(strike.step + story.max_steps // planned, story.max_steps - STEPS_FOR_A_STRIKE * len(pending))
    if len(story.up()) < workers and story.running_step < latest:
        return math.inf
    return last.t + strike.phase * story.step_s


def _obey(pressed: str, job: Job, screen: Screen, draw: random.Random, storm: bool) -> None:
    for key in pressed:
        if key == "q":
            raise Quit
        if not storm:
            continue
        ranks = _living_ranks(job)
        if key == "k" and len(ranks) > 1:
            _strike(job, screen, [draw.choice(ranks)], "key")
        elif key.isdigit() and int(key) in ranks and len(ranks) > 1:
            _strike(job, screen, [int(key)], "key")
        elif key == "a":
            wanted = len(job.story.members) + 1
            subprocess.Popen(
                cli("scale", str(job.run_dir), "--workers", str(wanted)),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip


def _living_ranks(job: Job) -> list[int]:
    return [worker.rank for worker in job.story.up() if worker.rank is not None]


def _strike(job: Job, screen: Screen, ranks: Sequence[int], by: str) -> None:
    kill = job.kill(ranks, time.time(), by)
    if kill is not None:
        screen.struck(job.story, kill)


def _sample_text(run_dir: Path, console: Console) -> str:
    """A short text from the trained model, through the public command; empty, and said so, if that fails."""
    command = cli("generate", str(run_dir), "--prompt", PROMPT, "--tokens", str(SAMPLE_TOKENS), "--seed", "0")
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        console.print(Text(f"no text was sampled: {result.stderr.strip()[-2000:]}", style="red"))
        return ""
    return result.stdout.rstrip("\n")


def _save_facts(settings: Settings, storm: Job, outcome: DemoOutcome) -> None:
    facts = _facts(settings, storm, outcome)
    (settings.storm_dir / "demo.json").write_text(json.dumps(facts, indent=2) + "\n")


def _facts(settings: Settings, storm: Job, outcome: DemoOutcome) -> dict[str, Any]:
    return {
        "seed": settings.seed,
        "storm": str(settings.storm_dir),
        "calm": str(settings.calm_dir),
        "kills": [asdict(kill) for kill in storm.kills],
        "outcome": outcome.to_json(),
    }


def _write_report(
    settings: Settings, console: Console, storm: Job, calm: Job, outcome: DemoOutcome, sample: str
) -> tuple[Path, ...]:
    """Write report.html and report.png; without matplotlib there are none, and the screen says so."""
    try:
        from elastic_harness.demo.report import Page, write
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        console.print("no report: it needs matplotlib (pip install 'elastic-harness[report]')")
        return ()
    page = Page(
        storm.story,
        calm.story,
        tuple(storm.kills),
        outcome,
        settings.seed,
        sample,
        settings.storm_dir,
        settings.calm_dir,
    )
    return write(page, settings.storm_dir)


def _print_verdict(
    console: Console, outcome: DemoOutcome, report: Sequence[Path], sample: str, elapsed_s: float
) -> None:
    console.print()
    console.print(Text("text from the trained model", style="dim"))
    console.print(Text(sample))
    console.print()
    for check in outcome.checks:
        mark = "[bold green]✓[/]" if check.holds else "[bold red]✗[/]"
        console.print(f"{mark} {escape(check.claim)}: {escape(check.evidence)}", highlight=False, soft_wrap=True)
    for path in report:
        console.print(f"  report: {escape(str(path))}", highlight=False, soft_wrap=True)
    if outcome.ok:
        console.print(Text(f"VERDICT: nothing was lost. ({elapsed_s:.0f} s)", style="bold green"))
    else:
        console.print(Text(f"VERDICT: NOT identical. ({elapsed_s:.0f} s)", style="bold red"))


def _settings(argv: list[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="elastic-harness demo",
        description="Train while workers are killed, train again undisturbed, and compare bit by bit.",
    )
    parser.add_argument("--seed", type=int, help="fixes when and whom the demo kills (default: drawn and printed)")
    parser.add_argument("--kills", type=int, default=5, help="how often workers are killed (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="workers of the first run (default: %(default)s)")
    parser.add_argument("--spares", type=int, default=1, help="warm spares of the first run (default: %(default)s)")
    parser.add_argument("--calm-workers", type=int, default=2, help="workers of the second run (default: %(default)s)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders go (default: runs)")
    parser.add_argument("--config", type=Path, help="the training's configuration (default: the demo's own)")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live screen")
    parser.add_argument("--json", action="store_true", help="the verdict as one JSON object; the rest on stderr")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change the configuration")
    arguments = parser.parse_args(argv)
    if arguments.workers < 2 or arguments.calm_workers < 1 or arguments.kills < 1 or arguments.spares < 0:
        raise ConfigError("the demo needs --workers of at least 2, --calm-workers and --kills of at least 1")
    config = arguments.config or default_config()
    resolved = load_config(TrainerConfig, str(config), arguments.overrides)
    stamp = time.strftime("demo-%Y%m%d-%H%M%S")
    runs_dir = arguments.runs_dir.resolve()
    return Settings(
        seed=secrets.randbelow(10**6) if arguments.seed is None else arguments.seed,
        config=config.resolve(),
        overrides=tuple(arguments.overrides),
        storm_dir=runs_dir / stamp,
        calm_dir=runs_dir / f"{stamp}-calm",
        workers=arguments.workers,
        spares=arguments.spares,
        kills=arguments.kills,
        calm_workers=arguments.calm_workers,
        max_steps=_max_steps(resolved),
        plain=arguments.plain,
        as_json=arguments.json,
    )


def _max_steps(config: TrainerConfig) -> int:
    if config.training.steps_known is None:
        raise ConfigError("the demo plans its kills by steps: give training.max_steps")
    return config.training.steps_known


def default_config() -> Path:
    """configs/demo.yaml, from the source tree or from the installed package."""
    candidates = [
        Path(__file__).resolve().parents[3] / "configs" / "demo.yaml",
        Path(str(resources.files("elastic_harness"))) / "configs" / "demo.yaml",
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"configs/demo.yaml is in none of {[str(path.parent) for path in candidates]}; give --config FILE"
    )
