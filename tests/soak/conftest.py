"""The storms use the training jobs of the integration tests."""

from integration.conftest import namespaces, train, undisturbed

__all__ = ["namespaces", "train", "undisturbed"]
