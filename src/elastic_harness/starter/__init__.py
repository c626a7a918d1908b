"""The files of a starter project, as `elastic-harness init` writes them. They are ordinary scripts."""
