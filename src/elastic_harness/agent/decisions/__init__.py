"""Which workers are let in, and who decides: this node alone, or several nodes through a store."""
