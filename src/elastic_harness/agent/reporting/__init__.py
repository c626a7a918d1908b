"""Everything that people and later readers are told: the console, incidents, the run's records."""
