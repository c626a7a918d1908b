"""Text, its order and its schedule: which samples a step reads, from (seed, epoch, position) alone."""
