"""The recovery protocol in a world of its own: model checkers and a simulator that drive the production decisions."""
