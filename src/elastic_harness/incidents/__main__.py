"""Prints docs/TROUBLESHOOTING.md: `make docs`."""

from __future__ import annotations

from elastic_harness.incidents.page import troubleshooting

print(troubleshooting(), end="")
