"""Checkpoints on local disk: a folder for each, whole once its manifest is there."""
