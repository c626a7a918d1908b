"""Chaos: break a training job on purpose, in known ways, and judge from its records whether anything was lost."""
