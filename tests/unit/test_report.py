"""What the demo shows and concludes, on run folders made up from the formats alone."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from elastic_harness import cli
from elastic_harness.demo.driver import moment
from elastic_harness.demo.plan import DOUBLE, RANK_ZERO, Strike, choose_victims, plan_strikes
from elastic_harness.demo.screen import Screen, render
from elastic_harness.demo.verdict import compare
from elastic_harness.report.terminal import sparkline
from elastic_harness.runs.events import EVENTS, read_events
from elastic_harness.runs.story import Kill, Story, tell_story
from unit.made_up_run import SHA, STAGES, make_run, write_lines


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Apply `change` to every line of a JSON-lines file; None drops the line."""
    records = [change(json.loads(line)) for line in path.read_text().splitlines()]
    write_lines(path, [record for record in records if record is not None])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, tuple[Kill, ...]]:
    kills = make_run(tmp_path / "storm", 3, workers=4, steps=60, strikes=5)
    make_run(tmp_path / "calm", 3, workers=2, steps=60, strikes=0)
    return tmp_path / "storm", tmp_path / "calm", kills


def story_of(run_dir: Path, kills: Iterable[Kill] = ()) -> Story:
    return tell_story(read_events(run_dir / EVENTS), kills)


def judge(pair: tuple[Path, Path, tuple[Kill, ...]]) -> Any:
    storm, calm, kills = pair
    return compare(storm, story_of(storm, kills), calm, story_of(calm))


def test_two_equal_runs_pass(pair: tuple[Path, Path, tuple[Kill, ...]]) -> None:
    outcome = judge(pair)
    assert outcome.ok, outcome.checks
    assert outcome.storm_sha256 == outcome.calm_sha256 == SHA
    assert outcome.largest_loss_difference == 0.0


def _nudge_loss(record: dict[str, Any]) -> dict[str, Any]:
    if record["event"] == "step_committed" and record["step"] == 31:
        record["loss"] = math.nextafter(record["loss"], 9)
    return record


def _other_weights(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"weights_sha256": "0" * 64} if record["event"] == "run_finished" else record


def _no_weights(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"weights_sha256": None} if record["event"] == "run_finished" else record


def _unnoticed(record: dict[str, Any]) -> dict[str, Any] | None:
    return None if record["event"] == "failure_detected" else record


def _unfinished(record: dict[str, Any]) -> dict[str, Any] | None:
    return None if record["event"] == "run_finished" else record


def _other_samples(record: dict[str, Any]) -> dict[str, Any]:
    if record["step"] == 7:
        record["slot_samples"][0] = "0" * 16
    return record


@pytest.mark.parametrize(
    ("file", "change", "claim"),
    [
        ("storm/events.jsonl", _nudge_loss, "loss identical"),
        ("calm/events.jsonl", _other_weights, "weights identical"),
        ("calm/events.jsonl", _no_weights, "weights identical"),
        ("storm/events.jsonl", _unnoticed, "every kill was noticed"),
        ("storm/events.jsonl", _unfinished, "ledger exact, run with failures"),
        ("storm/ledger.jsonl", _other_samples, "ledger exact, run with failures"),
        ("calm/ledger.jsonl", _other_samples, "ledger exact, run without"),
    ],
)
def test_anything_that_differs_fails_the_verdict(
    pair: tuple[Path, Path, tuple[Kill, ...]], file: str, change: Callable[..., Any], claim: str
) -> None:
    edit(pair[0].parent / file, change)
    outcome = judge(pair)
    assert not outcome.ok
    assert any(check.claim.startswith(claim) and not check.holds for check in outcome.checks), outcome.checks


def test_a_storm_without_kills_proves_nothing(pair: tuple[Path, Path, tuple[Kill, ...]]) -> None:
    outcome = compare(pair[1], story_of(pair[1]), pair[1], story_of(pair[1]))
    assert not outcome.ok


@pytest.mark.slow
def test_report_is_self_contained_and_shows_every_kill(pair: tuple[Path, Path, tuple[Kill, ...]]) -> None:
    pytest.importorskip("matplotlib")
    from elastic_harness.demo.report import Page, write

    storm, calm, kills = pair
    page = Page(story_of(storm, kills), story_of(calm), kills, judge(pair), 3, "def f():\n  <b>", storm, calm)
    html_path, png_path = write(page, storm)
    text = html_path.read_text()
    assert png_path.read_bytes().startswith(b"\x89PNG")
    assert not re.search(r"""(src|href)=["'](?!data:)""", text), "the page must load nothing from outside"
    pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text)
    assert len(pictures) == 4
    for picture in pictures:
        ElementTree.fromstring(base64.b64decode(picture))
    killed = sum(len(kill.members) for kill in kills)
    assert f"{killed} workers killed, nothing lost" in text
    for kill in kills:
        assert all(str(pid) in text for pid in kill.pids)
    assert "&lt;b&gt;" in text and "<b>\n" not in text
    assert SHA in text


@pytest.mark.slow
def test_report_of_a_failed_verdict_says_so_first(pair: tuple[Path, Path, tuple[Kill, ...]]) -> None:
    pytest.importorskip("matplotlib")
    from elastic_harness.demo.report import Page, render

    edit(pair[1] / "events.jsonl", _other_weights)
    storm, calm, kills = pair
    page = Page(story_of(storm, kills), story_of(calm), kills, judge(pair), 3, "", storm, calm)
    text = render(page)
    assert "does NOT hold: weights identical" in text and "nothing lost" not in text


def test_story_measures_from_the_kill_to_the_next_commit(pair: tuple[Path, Path, tuple[Kill, ...]]) -> None:
    storm, _, kills = pair
    story = story_of(storm, kills)
    for kill in kills:
        stages, after = story.stages_after(kill.t), story.after_ms(kill.t)
        assert after is not None
        assert list(stages) == ["detect_ms", *STAGES]
        assert stages["detect_ms"] == pytest.approx(4 * len(kill.members), abs=0.01)
        assert 0 < sum(stages.values()) < after
        assert story.commits[kill.step].t == pytest.approx(kill.t + after / 1000)
    assert sorted(story.commits) == list(range(60))
    assert {worker.end for worker in story.workers.values()} == {"killed", "stopped"}


def test_story_drops_what_a_restore_supersedes() -> None:
    def commit(step: int, lineage: int) -> dict[str, Any]:
        return {"t": float(step), "event": "step_committed", "lineage": lineage, "step": step,
                "generation": 1, "world_size": 2, "loss": 1.0 + lineage, "tokens": 1,
                "step_s": 0.1}  # fmt: skip

    restart = {"t": 9.0, "event": "run_started", "lineage": 1, "resumed_from_step": 2}
    story = tell_story([*(commit(step, 0) for step in range(5)), restart, commit(2, 1)])
    assert {step: commit.loss for step, commit in story.commits.items()} == {0: 1.0, 1: 1.0, 2: 2.0}
    # after an agent's death the newest checkpoint on disk may be older than the snapshot that is taken
    restart |= {"lineage": 0}
    story = tell_story([*(commit(step, 0) for step in range(5)), restart, commit(4, 1), commit(5, 1)])
    losses = {step: commit.loss for step, commit in story.commits.items()}
    assert losses == {**dict.fromkeys(range(4), 1.0), 4: 2.0, 5: 2.0}


@given(st.integers(0, 10**6), st.integers(20, 200), st.integers(2, 8))
def test_plan_is_repeatable_spread_out_and_holds_the_promised_kinds(seed: int, steps: int, count: int) -> None:
    plan = plan_strikes(seed, steps, count)
    assert plan == plan_strikes(seed, steps, count)
    assert len(plan) == count
    assert [strike.step for strike in plan] == sorted(strike.step for strike in plan)
    assert all(0 < strike.step < steps - 1 and 0 <= strike.phase < 1 for strike in plan)
    kinds = [strike.what for strike in plan]
    assert RANK_ZERO in kinds and DOUBLE in kinds


def test_strike_waits_for_its_step_and_for_replacements_but_not_for_ever() -> None:
    story = tell_story([{"t": 5.0, "event": "generation", "number": 1, "members": ["a", "b"]}])
    story.max_steps = 40
    for member in "ab":
        story.apply({"t": 5.0, "event": "worker_started", "member": member, "pid": 1})
    pending = [Strike(10, 0.5, DOUBLE), Strike(20, 0.5, RANK_ZERO)]

    def due(step: int, workers: int) -> float:
        story.apply({"t": 10.0, "event": "step_committed", "step": step - 1, "generation": 1, "world_size": 2,
                     "loss": 1.0, "tokens": 1, "step_s": 0.2})  # fmt: skip
        return moment(story, pending, 2, workers)

    assert due(9, 2) == math.inf, "its step has not begun"
    assert due(10, 2) == pytest.approx(10.1)
    assert due(11, 3) == math.inf, "a replacement is still starting"
    assert due(29, 3) == math.inf
    assert due(30, 3) == pytest.approx(10.1), "it has waited long enough"


@given(st.sampled_from([RANK_ZERO, DOUBLE, "a random worker"]), st.sets(st.integers(0, 5)), st.integers())
def test_victims_always_leave_a_survivor(what: str, ranks: set[int], seed: int) -> None:
    victims = choose_victims(what, sorted(ranks), random.Random(seed))
    assert set(victims) <= ranks
    assert not victims or len(victims) < len(ranks)
    assert len(victims) == len(set(victims)) <= 2


def test_live_screen_shows_who_is_up_and_every_recovery(pair: tuple[Path, Path, tuple[Kill, ...]]) -> None:
    storm, _, kills = pair
    story = Story(max_steps=60)
    shown: list[Kill] = []
    for line in (storm / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        for kill in kills:
            if kill not in shown and kill.t <= event["t"]:
                story.mark_killed(kill)
                shown.append(kill)
        story.apply(event)
        if event.get("step") == 50 and event["event"] == "step_committed":
            break
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(render(story, shown, "storm", "q quit", 118))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "51/60 steps" in text and "q quit" in text
    for worker in story.up():
        assert f"rank {worker.rank} pid {worker.pid}" in text
    for kill in shown:
        assert f"{story.after_ms(kill.t):.0f} ms" in text
    assert "rebuild" in text
    assert "▁" in text and "█" in text, "the loss so far must show as a line of blocks"


def test_plain_output_tells_the_same_in_lines(pair: tuple[Path, Path, tuple[Kill, ...]]) -> None:
    storm, _, kills = pair
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    story = story_of(storm, kills)
    story.max_steps = 60
    with Screen(console, "run 1 of 2", plain=False) as screen:
        screen.struck(story, kills[0])
        screen.update(story, kills)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"KILL  {kills[0].label}" in text
    assert text.count("recovered in") == len(kills)
    assert "60/60 steps" in text


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(2, 80))
@example([0.0, -2.225073858507e-311], 80)
def test_sparkline_fits_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def _tiny_run(folder: Path) -> Any:
    from elastic_harness.config import load_config
    from elastic_harness.gpt.config import TrainerConfig
    from elastic_harness.gpt.model import GPT

    config = load_config(TrainerConfig, None, ["model.n_layer=1", "model.d_model=16", "model.n_head=2"])
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    return GPT(config.model, seed=5)


def test_generate_is_repeatable_and_works_from_export_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    from elastic_harness.checkpoint.disk import local
    from elastic_harness.gpt import generate

    model = _tiny_run(tmp_path)
    stored = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}  # tied weights once
    asked = [str(tmp_path), "--prompt", "def ", "--tokens", "24", "--seed", "1"]
    assert generate.main(asked) == 2
    assert "nor a checkpoint" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    local.save(tmp_path / "checkpoints", 3, {}, {f"model.{name}": value for name, value in stored.items()}, {})
    assert generate.main(asked) == 0
    from_checkpoint = capsys.readouterr().out
    shutil.move(tmp_path / "checkpoints", tmp_path / "away")
    save_file(stored, tmp_path / "weights.safetensors")
    assert generate.main(asked) == 0
    assert capsys.readouterr().out == from_checkpoint
    assert from_checkpoint.startswith("def ") and len(from_checkpoint) > 8
    assert cli.main(["generate", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["text"] + "\n" == from_checkpoint and told["seed"] == 1
    assert generate.main([*asked, "--seed", "2"]) == 0
    assert capsys.readouterr().out != from_checkpoint


def test_generate_reads_the_configuration_of_an_earlier_version(tmp_path: Path) -> None:
    import yaml
    from safetensors.torch import save_file

    from elastic_harness.gpt import generate

    model = _tiny_run(tmp_path)
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, tmp_path / "weights.safetensors")
    earlier = yaml.safe_load((tmp_path / "config.yaml").read_text())
    earlier["training"] |= {**earlier.pop("trainer"), "precision": "bf16"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(earlier))
    assert generate.load_model(tmp_path).config == model.config


def test_generate_takes_the_newest_checkpoint_of_a_run_that_went_on_after_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file

    from elastic_harness.checkpoint.disk import local
    from elastic_harness.gpt import generate

    folder = tmp_path / "runs" / "first"
    folder.parent.mkdir()
    model = _tiny_run(folder)
    newer = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    save_file({name: torch.zeros_like(tensor) for name, tensor in newer.items()}, folder / "weights.safetensors")
    (folder / "checkpoints").mkdir()
    local.save(folder / "checkpoints", 3, {}, {f"model.{name}": value for name, value in newer.items()}, {})
    assert torch.equal(generate.load_model(folder).state_dict()["embedding.weight"], newer["embedding.weight"])
    monkeypatch.chdir(tmp_path)
    assert generate.main(["first", "--tokens", "4"]) == 0, capsys.readouterr().err
    assert generate.main(["secnd"]) == 2
    assert "neither secnd nor runs/secnd is there" in capsys.readouterr().err


def test_generate_says_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import save_file

    from elastic_harness.gpt import generate

    assert generate.main([str(tmp_path)]) == 2
    assert "no config.yaml" in capsys.readouterr().err
    _tiny_run(tmp_path)
    save_file({"other.weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    assert generate.main([str(tmp_path)]) == 2
    assert "do not fit the model" in capsys.readouterr().err
    (tmp_path / "weights.safetensors").write_bytes(b"torn")
    assert generate.main([str(tmp_path)]) == 4
    assert generate.main([str(tmp_path), "--tokens", "-1"]) == 2
    assert generate.main([str(tmp_path), "--prompt", ""]) != 0
