"""The built-in model, `GPT`, and its trainer. torch is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.gpt.config import ModelConfig
    from elastic_harness.gpt.model import GPT

__all__ = ["GPT", "ModelConfig"]

__getattr__, __dir__ = lazy.attach(
    __name__, {"GPT": "elastic_harness.gpt.model", "ModelConfig": "elastic_harness.gpt.config"}
)
