"""The trained weights as a plain safetensors file, which `safetensors.torch.load_file` and plain PyTorch read."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from elastic_harness import durable_file
from elastic_harness.errors import InfrastructureError
from elastic_harness.train.state import weights


def export_weights(model: nn.Module, path: Path) -> None:
    """Write parameters and persistent buffers under their state_dict names, tied ones once: all or nothing. Raises
    InfrastructureError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights(model)}
    try:
        durable_file.remove_leftovers(path)
        with durable_file.replacing(path) as temporary:
            save_file(tensors, temporary)
    except (OSError, SafetensorError) as error:
        raise InfrastructureError(
            f"The trained weights cannot be written to {path}: {error}; free space there and launch again, which "
            "resumes at the newest checkpoint."
        ) from error
