"""What `elastic-harness COMMAND` runs. `cli.py` has the list."""
