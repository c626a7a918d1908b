"""Who is let in, and who decides: this node alone, or several through a store."""
