"""The trained weights as a plain safetensors file, which `safetensors.torch.load_file` and plain PyTorch read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torch import nn

from elastic_harness.errors import InfrastructureError
from elastic_harness.train.state import weights


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def export_weights(model: nn.Module, path: Path) -> None:
    """Write parameters and persistent buffers under their state_dict names, tied ones once; replaces atomically, and
    removes what a writer that was killed has left."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights(model)}
    for stale in path.parent.glob(f".{path.name}.*"):
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise InfrastructureError(
            f"The trained weights cannot be written to {path}: {error}; free space there and launch again, which "
            "resumes at the newest checkpoint."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
