"""Checkpoints to and from foreign formats: safetensors files, `torch.save`, PyTorch's DCP, Hugging Face folders.

No foreign code can run. `torch.save` files are read by torch's `weights_only` loader. DCP's metadata is a pickle. It is
read by a loader that knows the few classes of which such metadata consists, and refuses everything else.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from elastic_harness import durable_file
from elastic_harness.checkpoint.disk import local, manifest
from elastic_harness.checkpoint.disk.manifest import Checkpoint
from elastic_harness.checkpoint.layout import ITEM_BYTES
from elastic_harness.checkpoint.packages import packages
from elastic_harness.checkpoint.state import STATES
from elastic_harness.checkpoint.structure import decode, encode
from elastic_harness.errors import ConfigError, InfrastructureError

Format = Literal["safetensors", "torch", "dcp", "hf"]
FORMATS: tuple[Format, ...] = ("safetensors", "torch", "dcp", "hf")
MODEL_PREFIXES = ("model.", "model_state.")  # of a run's tensors, and of a CheckpointState's
HF_FILE, HF_INDEX = "model.safetensors", "model.safetensors.index.json"
HF_SHARD_BYTES = 5_000_000_000


def guess_format(path: Path) -> Format:
    """Return the format of a path, or the one that it is to have, by its name and content. Raises ConfigError if
    neither tells."""
    if path.suffix == ".safetensors":
        return "safetensors"
    if path.suffix in (".pt", ".pth", ".bin"):
        return "torch"
    if (path / ".metadata").exists():
        return "dcp"
    if (path / HF_FILE).exists() or (path / HF_INDEX).exists():
        return "hf"
    raise ConfigError(
        f"{path} does not tell its format: give a name ending in .safetensors or .pt, or --format {', '.join(FORMATS)}."
    )


# ---- export


def export(checkpoint: Checkpoint, output: Path, form: Format, *, everything: bool) -> int:
    """Write the weights, or everything, as a file or folder of this format, and return how many tensors were written. A
    folder must not be there yet. Raises CheckpointCorrupt, ConfigError, InfrastructureError."""
    skeleton, stored, _ = local.load(checkpoint)
    tensors = stored if everything else weights(stored)
    if not tensors:
        raise ConfigError(f"{checkpoint.path} has no weights of a model; use --all for everything that is in it.")
    try:
        with durable_file.replacing(output) as temporary:
            if form == "safetensors":
                _save_safetensors(tensors, temporary)
            elif form == "torch":
                state: dict[str, Any] = decode(skeleton, stored) if everything else tensors
                if everything and "model_state" not in state:
                    state["model"] = weights(stored)  # of a run: the model's tensors are not in the skeleton
                torch.save(state, temporary)
            else:
                if output.exists():
                    raise ConfigError(f"{output} is there already; export to a new folder.")
                temporary.mkdir(parents=True)
                (_export_dcp if form == "dcp" else _export_hf)(tensors, temporary)
    except (OSError, RuntimeError) as error:
        raise InfrastructureError(f"{output} cannot be written: {error}.") from error
    return len(tensors)


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors, under their own names."""
    for prefix in MODEL_PREFIXES:
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if found:
            return found
    return {}


def _save_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _export_hf(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write files as `transformers` lays them out: one file, or several and an index."""
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if files[-1] and size + nbytes > HF_SHARD_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += nbytes
    if len(files) == 1:
        _save_safetensors(files[0], folder / HF_FILE)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _save_safetensors(part, folder / name)
        places |= dict.fromkeys(part, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / HF_INDEX).write_text(json.dumps(index, indent=2))


def _export_dcp(tensors: dict[str, Tensor], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with _one_process():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@contextmanager
def _one_process() -> Iterator[None]:
    """DCP warns of what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# ---- import


def import_from(source: Path, folder: Path, step: int, form: Format) -> Path:
    """Make a checkpoint of what is in a foreign file or folder: `model_state` of a flat set of tensors, or what a
    nested `torch.save` holds under the names of a CheckpointState. Returns its path. Raises ConfigError for what cannot
    be read, or not safely; InfrastructureError if the disk refuses."""
    if not source.exists():
        raise ConfigError(f"{source} does not exist.")
    final = folder / f"step-{step:08d}"
    if final.exists():
        raise ConfigError(f"{final} is there already; give another --step, or remove it.")
    readers: dict[str, Callable[[Path], Any]] = {
        "safetensors": _read_safetensors, "torch": _read_torch, "dcp": _read_dcp, "hf": _read_hf
    }  # fmt: skip
    state = readers[form](source)
    if not isinstance(state, dict):
        raise ConfigError(f"{source} holds a {type(state).__name__}; a dict of tensors or of states is needed.")
    named = {name: state.get(name) for name in STATES}
    if all(isinstance(value, Tensor) for value in state.values()):
        named |= {"model_state": dict(state)}
    else:
        for theirs, ours in ALIASES.items():
            if named.get(ours) is None and isinstance(state.get(theirs), dict):
                named[ours] = state[theirs]
        if named["model_state"] is None:
            raise ConfigError(
                f"{source} holds {', '.join(map(str, list(state)[:8]))}: none of them is a model's state. Names that "
                f"are known: {', '.join([*STATES, *ALIASES])}."
            )
    tensors: dict[str, Tensor] = {}
    skeleton = {name: encode(value, name, tensors) for name, value in named.items()}
    skeleton["extra"] = skeleton.get("extra") or {}
    meta = {"lineage": 0, "imported_from": str(source), "format": form, "packages": packages()}
    return local.save(folder, step, skeleton, tensors, meta)


ALIASES = {
    "model": "model_state", "model_state_dict": "model_state", "state_dict": "model_state",
    "optimizer": "optimizer_state", "optimizer_state_dict": "optimizer_state", "optim": "optimizer_state",
    "scheduler": "scheduler_state", "lr_scheduler": "scheduler_state", "scaler": "scaler_state", "ema": "ema_state",
}  # fmt: skip


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is no safetensors file: {error}.") from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # it raises whatever its parts raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} cannot be read without running what it contains (torch.load with weights_only): {first} Load it "
            "where you trust it, and save its state_dicts alone."
        ) from error


def _read_dcp(path: Path) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            with (path / ".metadata").open("rb") as file:
                metadata: Metadata = _MetadataUnpickler(file).load()
            places = [Path(stored.relative_path) for stored in (metadata.storage_data or {}).values()]
            if any(place.is_absolute() or ".." in place.parts for place in places):
                raise ValueError("it names files outside its folder")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    try:
        reader = Reader(path)
        known = reader.read_metadata().state_dict_metadata.items()
        into = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in known
            if isinstance(stored, TensorStorageMetadata)
        }
        with _one_process():
            dcp.load(into, storage_reader=reader, no_dist=True)
        return into
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as a DCP folder: {error}.") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata. Knows the classes of which that consists, and no class that could do anything else."""

    _KNOWN = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", *ITEM_BYTES},
        "pathlib": {"PosixPath"},
        "pathlib._local": {"PosixPath"},
        "collections": {"OrderedDict"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._KNOWN.get(module, set()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in DCP's metadata")
        return super().find_class(module, name)


def _read_hf(path: Path) -> dict[str, Tensor]:
    index = path / HF_INDEX
    if not index.exists():
        return _read_safetensors(path / HF_FILE)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is damaged: {error}.") from error
    odd = [name for name in names if not manifest.is_file_name(name)]
    if odd:
        raise ConfigError(f"{index} names the file {odd[0]!r}, which is outside its folder or no safetensors file.")
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= _read_safetensors(path / name)
    return tensors
