"""The training side: the loop and recovery. `python -m elastic_harness.train` is the built-in trainer, of `gpt/`."""
