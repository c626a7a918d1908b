"""Failures that are no deaths: what is noticed, and what is done about it. Pure rules; others act on them."""
