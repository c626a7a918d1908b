"""The storms use the training jobs of the integration tests."""

from integration.conftest import train, undisturbed

__all__ = ["train", "undisturbed"]
