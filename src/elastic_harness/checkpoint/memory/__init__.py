"""Snapshots in shared memory, which outlive the process that took them. Without torch."""
