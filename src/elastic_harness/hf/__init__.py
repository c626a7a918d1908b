"""Hugging Face: `ElasticTrainer` in place of `transformers.Trainer`. An ordinary user of `elastic_harness.start`.

    from elastic_harness.hf import ElasticTrainer      # before TrainingArguments are made
    trainer = ElasticTrainer(model=model, args=args, train_dataset=dataset, …)
    trainer.train()

docs/hugging_face.md tells more. Needs `pip install 'elastic-harness[hf]'`.
"""

from __future__ import annotations

from elastic_harness.hf import environment

environment.hide()

try:
    from elastic_harness.hf.trainer import ElasticTrainer
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ModuleNotFoundError(
        f"elastic_harness.hf needs {error.name}: pip install 'elastic-harness[hf]'", name=error.name
    ) from None

__all__ = ["ElasticTrainer"]
