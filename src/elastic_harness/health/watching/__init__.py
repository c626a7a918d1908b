"""Tools that watch over a training script which does not use the rest of the harness. They gather what they judge."""
