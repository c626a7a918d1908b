"""Prints docs/chaos.md: `make docs`."""

from __future__ import annotations

from elastic_harness.chaos.page import page

print(page(), end="")
