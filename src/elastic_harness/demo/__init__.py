"""The demo: train while workers are killed, train again undisturbed, and compare bit by bit."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """`elastic-harness demo`: 0 only if the verdict holds."""
    from elastic_harness.demo.driver import main as run

    return run(argv)
