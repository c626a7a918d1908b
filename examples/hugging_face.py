"""Fine-tuning a language model with Hugging Face's Trainer. What differs from a usual script is marked with ◄.

    python examples/hugging_face.py
    elastic-harness launch --nproc-per-node 4 examples/hugging_face.py
    elastic-harness launch --nproc-per-node 2 examples/hugging_face.py --lora

All end on the same weights, bit for bit, whoever is killed on the way (those with --lora on others, of course). The
model is a tiny Llama made from its configuration, so that nothing is downloaded; the text is this file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from elastic_harness.hf import ElasticTrainer  # ◄ at the top: before TrainingArguments are made

BLOCK = 48


def texts() -> Any:
    """Blocks of bytes of different lengths, as `datasets` would read them from anywhere, memory-mapped."""
    from datasets import Dataset

    data = Path(__file__).read_bytes() * 2
    lengths = [BLOCK - (7 * number) % 20 for number in range(96)]
    starts = [sum(lengths[:number]) % (len(data) - BLOCK) for number in range(96)]
    blocks = [list(data[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    return Dataset.from_dict({"input_ids": blocks}).train_test_split(16, seed=0)


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Pad a batch; padding is no target."""
    import torch

    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = torch.tensor(sample["input_ids"])
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_model(lora: bool) -> Any:
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=BLOCK,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            attention_dropout=0.1,
        )
    )
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/hugging_face")
    parser.add_argument("--lora", action="store_true", help="train adapters over a frozen model")
    arguments = parser.parse_args()

    set_seed(0)
    model, data = make_model(arguments.lora), texts()
    args = TrainingArguments(
        output_dir=arguments.output_dir,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,  # ◄ of all workers together
        num_train_epochs=4,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=10,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = ElasticTrainer(  # ◄
        model=model,
        args=args,
        data_collator=collate,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"evaluation loss {metrics['eval_loss']:.4f} after {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
