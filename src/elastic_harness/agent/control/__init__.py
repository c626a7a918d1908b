"""The socket of a live run: what it can be asked for, and what it answers."""
