"""The processes of a node: started, watched, restarted, reaped."""
