"""The recovery protocol in a world of its own: a model checker that drives the production decisions."""
