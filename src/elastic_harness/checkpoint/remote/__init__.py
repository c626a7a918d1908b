"""Checkpoints in object storage, whole or as the difference to the one before."""
