"""The training side: the loop, recovery, and the built-in trainer (`python -m elastic_harness.train`)."""
