"""Built-in models: `GPT`, which the built-in trainer trains. torch is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.models.gpt import GPT

__all__ = ["GPT"]

__getattr__, __dir__ = lazy.attach(__name__, {"GPT": "elastic_harness.models.gpt"})
