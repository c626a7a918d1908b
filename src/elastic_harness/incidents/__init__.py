"""The kinds of things that go wrong, each with a stable code. Pure."""
