"""Checkpoints on a local disk: whole or absent, checked when loaded, and never a pickle.

A checkpoint is a folder ``step-00000060`` with ``state.safetensors`` and a ``manifest.json``. It is written
under a temporary name, synced, and renamed, so that the final name never shows a partial one. The manifest
names every tensor with its type and shape, the file with its size and sha256, and its own sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_harness.errors import CheckpointCorrupt, InfrastructureError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
STATE_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"
HASH_CHUNK_BYTES = 1 << 22
_NAME = re.compile(r"step-(\d{8,})(\.old)?")  # .old: stepped aside while its successor takes the name
_TEMPORARY = re.compile(r"step-\d{8,}(?:\.old)?\.tmp-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole; its tensors are checked by ``load``."""

    path: Path
    step: int
    lineage: int
    meta: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def bytes(self) -> int:
        """The size of the tensors' file."""
        return int(self.manifest["files"][STATE_FILE]["bytes"])


def save(
    folder: Path,
    step: int,
    skeleton: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint and returns its path once it is durable; replaces one of the same step.

    ``skeleton`` and ``meta`` hold plain JSON values (a key that is not text raises TypeError);
    ``meta["lineage"]`` is the lineage, 0 if absent. Tensors may be on any device and of any shape; ones that
    share memory are written separately. Blocks for the write and its fsync. One call at a time per process.
    Raises InfrastructureError if the disk refuses; nothing is left behind then.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    temporary = folder / f"{final.name}.tmp-{os.getpid()}"
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(folder.parent)
        _clean(folder)
        temporary.mkdir()
        _write_state(temporary / STATE_FILE, tensors)
        manifest = _manifest(temporary / STATE_FILE, step, skeleton, tensors, meta)
        _write_synced(temporary / MANIFEST_FILE, json.dumps(manifest, sort_keys=True, indent=1).encode())
        _sync_folder(temporary)
        _replace_folder(temporary, final)
        _sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise InfrastructureError(
            f"The checkpoint of step {step} cannot be written to {folder}: {error}; "
            "free space there or choose another --run-dir. Training state is unharmed."
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def newest(folder: Path) -> list[Checkpoint]:
    """All checkpoints in the folder that have a valid manifest, the newest step first.

    Only manifests and file sizes are read here. Partial, foreign and damaged folders are passed over.
    """
    by_step: dict[int, Checkpoint] = {}
    for path in sorted(_candidates(folder), reverse=True):  # step-….old comes before, and yields to, step-…
        checkpoint = read_manifest(path)
        if checkpoint is not None:
            by_step[checkpoint.step] = checkpoint
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def load(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """The skeleton, the tensors (on the CPU) and the meta data, after checking every byte.

    Raises CheckpointCorrupt if anything differs from the manifest; fall back to the next older one then.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_bytes

    path, manifest = checkpoint.path, checkpoint.manifest
    expected = manifest["files"][STATE_FILE]
    try:
        content = (path / STATE_FILE).read_bytes()
    except OSError as error:
        raise CheckpointCorrupt(f"{path / STATE_FILE} cannot be read: {error.strerror}.") from error
    # What was hashed is what is parsed: the file is read once.
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected["sha256"]:
        raise CheckpointCorrupt(
            f"{path / STATE_FILE} has sha256 {actual[:12]}…, its manifest says {expected['sha256'][:12]}…; "
            "an older checkpoint must be used."
        )
    try:
        tensors: dict[str, Tensor] = load_bytes(content)
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{path / STATE_FILE} is not a safetensors file: {error}.") from error
    described = {name: _describe(tensor) for name, tensor in tensors.items()}
    if described != manifest["tensors"]:
        differing = sorted(set(described) ^ set(manifest["tensors"])) or sorted(
            name for name in described if described[name] != manifest["tensors"][name]
        )
        raise CheckpointCorrupt(f"{path / STATE_FILE} disagrees with its manifest about {differing[:5]}.")
    return manifest["skeleton"], tensors, checkpoint.meta


def prune(folder: Path, keep_last: int) -> list[Path]:
    """Removes all but the ``keep_last`` newest valid checkpoints, and returns what it removed.

    At least one valid checkpoint stays, whatever ``keep_last`` says; damaged ones are left to be looked at.
    """
    removed = []
    for checkpoint in newest(folder)[max(1, keep_last) :]:
        _remove(checkpoint.path)
        removed.append(checkpoint.path)
    return removed


def read_manifest(path: Path) -> Checkpoint | None:
    """The checkpoint in this folder, or None if its manifest is missing, damaged or of another format."""
    name = _NAME.fullmatch(path.name)
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_bytes())
        if name is None or manifest["format_version"] != FORMAT_VERSION or manifest["step"] != int(name[1]):
            return None
        if manifest["sha256"] != _self_hash(manifest):
            return None
        if (path / STATE_FILE).stat().st_size != manifest["files"][STATE_FILE]["bytes"]:
            return None
        return Checkpoint(path, manifest["step"], manifest["lineage"], manifest["meta"], manifest)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _candidates(folder: Path) -> list[Path]:
    try:
        return [p for p in Path(folder).iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    except FileNotFoundError:
        return []


def _clean(folder: Path) -> None:
    """Finishes or removes what dead writers left half done; a live writer keeps its own."""
    for path in sorted(folder.iterdir()):
        temporary, old = _TEMPORARY.fullmatch(path.name), _NAME.fullmatch(path.name)
        if temporary and (int(temporary[1]) == os.getpid() or not Path(f"/proc/{temporary[1]}").exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif old and old[2]:
            if read_manifest(path.with_suffix("")) is None and read_manifest(path) is not None:
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                os.rename(path, path.with_suffix(""))
            else:
                _remove(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint; renamed first, so that a crash leaves no partial one under its name."""
    doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _write_state(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    if "__metadata__" in tensors:
        raise ValueError("A tensor is named __metadata__, which the safetensors format reserves; rename it.")
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, such as tied weights and views of one buffer.
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        separate[name] = plain
    save_file(separate, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_folder(source: Path, target: Path) -> None:
    """Renames source to target; an older target stays loadable, as ``.old``, until source has its name."""
    if not target.exists():
        os.rename(source, target)
        return
    old = target.with_name(f"{target.name}.old")
    os.rename(target, old)
    os.rename(source, target)
    _remove(old)


def _manifest(
    state: Path,
    step: int,
    skeleton: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "lineage": int(meta.get("lineage", 0)),
        "meta": meta,
        "skeleton": skeleton,
        "tensors": {name: _describe(tensor) for name, tensor in tensors.items()},
        "files": {STATE_FILE: {"bytes": state.stat().st_size, "sha256": _file_hash(state)}},
    }
    manifest = _as_json(manifest, "manifest")
    manifest["sha256"] = _self_hash(manifest)
    return manifest


def _as_json(value: Any, where: str) -> Any:
    """The value as JSON gives it back; TypeError for what JSON lacks or would change."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, but keys must be text; turn it into text first.")
        return {key: _as_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, but only JSON values go beside the tensors.")


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "file": STATE_FILE,
    }


def _self_hash(manifest: Mapping[str, Any]) -> str:
    """sha256 over the manifest without its own hash, as JSON with sorted keys and no blanks."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASH_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
