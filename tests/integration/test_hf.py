"""Hugging Face's Trainer with the loop of the harness: the same weights whoever is killed, what is refused, and what is
kept of the Trainer's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import elastic_harness
from elastic_harness import ConfigError
from elastic_harness.errors import UserCodeError
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import SOURCE
from integration.script_tools import failing, forked, launch, said

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'elastic-harness[hf]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'elastic-harness[hf]'")

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

from elastic_harness.hf import ElasticTrainer, environment  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
EXAMPLE = SOURCE.parent / "examples" / "hugging_face.py"
VOCABULARY, LENGTH, SAMPLES = 64, 16, 24


def tiny(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def text(samples: int = SAMPLES, *, padded: bool = False) -> list[dict[str, Tensor]]:
    """Packed samples; or, padded, of other lengths each, and some with no target at all."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=draw)
    labels = ids.clone()
    for number in range(samples) if padded else ():
        labels[number, 5 * number % (LENGTH + 1) :] = -100
    return [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 7,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }
    return TrainingArguments(**given)


def trainer(folder: Path, *, model: Any = None, more: dict[str, Any] | None = None, **given: Any) -> ElasticTrainer:
    given = {"train_dataset": text(), **given}
    return ElasticTrainer(model=model or tiny(), args=arguments(folder, **(more or {})), **given)


def weights_of(run_dir: Path) -> str:
    finished = [e for e in read_events(run_dir / "events.jsonl") if e["event"] == "run_finished"]
    return str(finished[-1]["weights_sha256"])


def losses_of(run_dir: Path) -> list[float]:
    committed = {e["step"]: e["loss"] for e in read_events(run_dir / "events.jsonl") if e["event"] == "step_committed"}
    return [committed[step] for step in sorted(committed)]


def history_of(output_dir: Path) -> list[dict[str, float]]:
    """What was logged up to the last checkpoint, without times."""
    state = json.loads((output_dir / "checkpoint-20" / "trainer_state.json").read_text())
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [{name: logs[name] for name in names if name in logs} for logs in state["log_history"]]


# ---- the example, as users run it


def test_workers_killed_in_steps_leave_the_same_weights_evaluations_and_files(tmp_path: Path) -> None:
    ended = forked(EXAMPLE, "--output-dir", tmp_path / "alone")
    assert ended.returncode == 0, said(ended)
    kills = "slot.backward member=w0-1 step=6 kill; slot.backward member=w1-1 step=11 kill"
    options = ("--nproc-per-node", 3)
    killed = launch(tmp_path / "run", EXAMPLE, "--output-dir", tmp_path / "killed", options=options, **failing(kills))
    assert killed.returncode == 0, said(killed)
    alone = tmp_path / "alone"
    assert weights_of(tmp_path / "run") == weights_of(alone / "run") and verify(tmp_path / "run").ok
    for name in ("model.safetensors", "checkpoint-10/model.safetensors", "checkpoint-20/config.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (alone / name).read_bytes(), name
    assert history_of(tmp_path / "killed") == history_of(alone), "whoever is rank 0 has the whole history"
    last = [line for line in killed.stdout.splitlines() if "evaluation loss" in line]
    assert len(last) == 1 and last[0].endswith(ended.stdout.splitlines()[-1]), said(killed)
    failures = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "failure_detected"]
    assert len(failures) == 2


# ---- what is computed


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_the_weights_are_those_of_a_loop_of_ones_own(padded: bool, tmp_path: Path) -> None:
    data = text(padded=padded)
    theirs = trainer(tmp_path / "hf", train_dataset=data)
    theirs.train()

    model = tiny()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}], lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (7 - step) / 7)
    training = {"max_steps": 7, "global_batch_samples": 8, "micro_batch_samples": 2}
    config = elastic_harness.Config.from_dict({"seed": 42, "training": training})

    def counted(batch: Any) -> Tensor:
        """Which targets count is the Trainer's decision; it differs between its versions."""
        return torch.as_tensor(theirs.get_batch_samples(iter([batch]), 1, "cpu")[1])

    full = max(1.0, float(counted(torch.utils.data.default_collate(data[:2]))))
    run = elastic_harness.start(model, optimizer, data, config, scheduler=scheduler, run_dir=tmp_path / "own")
    for step in run.steps():
        for batch in step.micro_batches():
            count = counted(batch)
            targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].reshape(-1)

            def loss(batch: Any = batch, targets: Tensor = targets, count: Tensor = count) -> Tensor:
                logits = model(input_ids=batch["input_ids"]).logits.float().view(-1, VOCABULARY)
                return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count

            step.backward(loss, float(count) / full)
    assert weights_of(tmp_path / "hf" / "run") == weights_of(tmp_path / "own")


class InOurOrder(transformers.Trainer):  # type: ignore[misc]
    """Hugging Face's own, with the samples in the order of the harness."""

    def _get_train_sampler(self, *_: Any) -> list[int]:
        from elastic_harness.data.order import epoch_order

        return [int(n) for epoch in range(3) for n in epoch_order(SAMPLES, 42, epoch)(range(SAMPLES))]


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_losses_and_norms_are_those_of_hugging_faces_trainer(padded: bool, tmp_path: Path) -> None:
    data = text(padded=padded)
    rival = InOurOrder(model=tiny(0.0), args=arguments(tmp_path / "rival"), train_dataset=data)
    rival.train()
    ours = trainer(tmp_path / "ours", model=tiny(0.0), train_dataset=data)
    ours.train()
    for name in ("loss", "grad_norm", "learning_rate"):
        theirs = [entry[name] for entry in rival.state.log_history if "loss" in entry]
        found = [entry[name] for entry in ours.state.log_history if "loss" in entry]
        assert found == pytest.approx(theirs, rel=2e-5), name
    for mine, other in zip(ours.model.parameters(), rival.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_an_evaluation_changes_no_bit_under_autocast(tmp_path: Path) -> None:
    """Accelerate wraps the forward of a model that is evaluated; a worker that joins later has evaluated nothing."""
    for name, more in {"evaluated": {"eval_strategy": "steps", "eval_steps": 2}, "not": {}}.items():
        trainer(tmp_path / name, more={"bf16": True, **more}, eval_dataset=text(4)).train()
    assert weights_of(tmp_path / "evaluated" / "run") == weights_of(tmp_path / "not" / "run")


# ---- going on


class Interrupt(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise ZeroDivisionError


def test_a_run_goes_on_with_its_log_its_patience_and_its_best_weights(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 30,
        "learning_rate": 0.3,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }

    def begin(folder: Path, *callbacks: Any) -> ElasticTrainer:
        return trainer(
            folder,
            more=settings,
            eval_dataset=text(4),
            callbacks=[EarlyStoppingCallback(3), *callbacks],
            elastic={"checkpoint": {"checkpoint_interval": 1}},
        )

    whole = begin(tmp_path / "whole")
    whole.train()
    stopped = whole.state.global_step
    assert 4 < stopped < 30, "it stopped early"
    for step in (2, stopped - 1):
        with pytest.raises(ZeroDivisionError):
            begin(tmp_path / "cut", Interrupt(step)).train()
    again = begin(tmp_path / "cut")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == stopped and weights_of(tmp_path / "cut/run") == weights_of(tmp_path / "whole/run")
    history = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (again, whole)]
    assert history[0] == history[1] and len(history[0]) == stopped
    assert again.state.best_metric == whole.state.best_metric
    pairs = zip(again.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "the best weights were loaded"
    names = sorted(p.name for p in (tmp_path / "cut").glob("*checkpoint-*"))
    best = f"checkpoint-{whole.state.best_global_step}"
    assert names == sorted({best, f"checkpoint-{stopped}"}), "two are kept, and nothing unfinished"


def test_adapters_alone_are_exchanged_and_saved_and_another_base_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(tiny(), config)

    first = trainer(tmp_path, model=adapted())
    base = {name: p.clone() for name, p in first.model.named_parameters() if not p.requires_grad}
    first.train()
    first.save_model()
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    largest = max(p.stat().st_size for p in (tmp_path / "run").rglob("*.safetensors"))
    assert largest < sum(p.nbytes for p in base.values()) / 2
    assert all(torch.equal(p, base[name]) for name, p in first.model.named_parameters() if name in base)

    other = adapted()
    with torch.no_grad():
        other.base_model.model.transformer.wpe.weight.add_(1.0)
    with pytest.raises(ConfigError, match=r"hf\.frozen_parameters"):
        trainer(tmp_path, model=other).train()


# ---- what is refused


class Substep(TrainerCallback):  # type: ignore[misc]
    def on_substep_end(self, *_: Any, **__: Any) -> None: ...


class OwnStep(ElasticTrainer):
    def training_step(self, *_: Any, **__: Any) -> Tensor: ...  # type: ignore[empty-body]


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Any: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"more": {"auto_find_batch_size": True}}, "auto_find_batch_size"),
        ({"more": {"dataloader_drop_last": True}}, "exactly once"),
        ({"more": {"ignore_data_skip": True}}, "twice"),
        ({"more": {"data_seed": 5}}, "Leave data_seed out"),
        ({"more": {"include_num_input_tokens_seen": True}}, "include_num_input_tokens_seen"),
        ({"more": {"push_to_hub": True}}, r"trainer\.push_to_hub\(\)"),
        ({"more": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}}, "knows no validation"),
        ({"more": {"optim": "schedule_free_adamw"}}, "swaps other weights"),
        ({"callbacks": [Substep()]}, "on_substep_end"),
        ({"elastic": {"training": {"clip_norm": 2.0}}}, "max_grad_norm"),
        ({"elastic": {"seed": 3}}, "TrainingArguments"),
        ({"elastic": {"training": {"max_step": 2}}}, "max_steps"),
        ({"train_dataset": Numbers()}, "streaming=True"),
        ({"train_dataset": None}, "train_dataset"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_what_to_do(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **given).train()


def test_an_override_that_is_not_called_and_a_folder_without_exact_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="override compute_loss"):
        OwnStep(model=tiny(), args=arguments(tmp_path), train_dataset=text())
    with pytest.raises(ConfigError, match="no exact state"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    with pytest.raises(ConfigError, match="one run per trial"):
        trainer(tmp_path).hyperparameter_search()


class StopEpoch(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


def test_the_rest_of_an_epoch_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="should_epoch_stop"):
        trainer(tmp_path, callbacks=[StopEpoch()]).train()


# ---- rank 0 and the environment


class Tracker(TrainerCallback):  # type: ignore[misc]
    """As the trackers of transformers are: it opens its run once, on rank 0 alone."""

    _initialized = False
    opened = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._initialized:
            self._initialized, self.opened = True, state.is_world_process_zero


def test_whoever_becomes_rank_0_opens_the_progress_bar_and_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracker, "__module__", "transformers.integrations")
    tracker = Tracker()
    one = trainer(tmp_path, more={"disable_tqdm": False}, callbacks=[tracker])
    set_rank = one._set_rank
    monkeypatch.setattr(one, "_set_rank", lambda rank: set_rank(0 if one.state.global_step >= 3 else 1))
    one.train()
    assert tracker.opened and one.is_world_process_zero()


def test_the_launchers_variables_are_shown_to_start_alone() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "PATH": "/bin"}
    kept = dict(environment._kept)
    try:
        environment.hide(variables)
        assert variables == {"PATH": "/bin"}
        with environment.shown(variables):
            assert variables["RANK"] == "1" and variables["WORLD_SIZE"] == "4"
        assert variables == {"PATH": "/bin"}
    finally:
        environment._kept.clear()
        environment._kept.update(kept)


@pytest.mark.parametrize(
    ("visible", "local_rank", "count", "own"),
    [(None, 1, 4, "1"), ("4,5", 1, 2, "5"), ("4,5", 3, 2, "5"), (None, 2, 1, None), (None, 0, 0, None)],
)
def test_a_worker_sees_its_own_gpu(visible: str | None, local_rank: int, count: int, own: str | None) -> None:
    assert environment.own_gpu(visible, local_rank, count) == own


def test_memory_mapped_datasets_are_read_as_they_are(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    plain = text()
    rows = {name: [sample[name].tolist() for sample in plain] for name in ("input_ids", "labels")}
    datasets.Dataset.from_dict(rows | {"number": list(range(SAMPLES))}).save_to_disk(tmp_path / "mapped")
    trainer(tmp_path / "mapped-run", train_dataset=datasets.load_from_disk(tmp_path / "mapped")).train()
    trainer(tmp_path / "plain").train()
    hashes = {weights_of(tmp_path / name / "run") for name in ("mapped-run", "plain")}
    assert len(hashes) == 1
