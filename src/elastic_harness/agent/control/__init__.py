"""What a run that is live can be asked for through its socket, and what it answers."""
