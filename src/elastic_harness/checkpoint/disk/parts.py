"""A checkpoint written by several processes, each its own part, without any message between them. Without torch.

All write into one folder, `step-00000060.parts-TOKEN`: each a file of tensors, and then a small JSON that says what is
in it. A process that finds all parts there writes the manifest and gives the folder its name. If several find that, a
file that can only be created once decides which of them does it. If a process dies, there is no checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk import manifest as manifests
from elastic_harness.checkpoint.disk.manifest import MANIFEST_FILE, StoredBlock, newest
from elastic_harness.checkpoint.layout import Piece, Slice, pieces
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError
from elastic_harness.failpoints import failpoint

_FOLDER = re.compile(r"step-(\d{8,})\.parts-[0-9a-f]+-\d+")


@dataclass(frozen=True)
class Part:
    """Which part of how many. All parts of one checkpoint have the same `token`, which was never used before."""

    index: int
    count: int
    token: str


def save_part(
    folder: Path,
    step: int,
    part: Part,
    skeleton: Mapping[str, Any],
    contents: Mapping[Slice, memoryview],
    meta: Mapping[str, Any],
    hashes: local.Hashes | None = None,
) -> Path | None:
    """Write one part, which is on disk when this returns. Return the checkpoint's path if this part completed it, else
    None. `skeleton` and `meta` are taken from part 0 alone. Raises InfrastructureError."""
    final = folder / f"step-{step:08d}"
    shared = folder / f"{final.name}.parts-{part.token}"
    number = f"{part.index:05d}-of-{part.count:05d}"
    try:
        shared.mkdir(parents=True, exist_ok=True)
        previous = next(iter(newest(folder)), None)
        file = f"state-{number}.safetensors"
        (shared / file).unlink(missing_ok=True)
        blocks, files = local.write_pieces(shared, file, contents, pieces(contents), previous, hashes)
        said: dict[str, Any] = {
            "blocks": [[list(piece.slice), *piece[1:], *block] for piece, block in blocks.items()],
            "files": files,
        }
        if part.index == 0:
            said |= {"skeleton": manifests.as_json(skeleton, "skeleton"), "meta": manifests.as_json(meta, "meta")}
        # The JSON says that the part is whole. So it comes after the tensors are on disk, and gets its name at once.
        temporary = shared / f".part-{number}.json"
        temporary.unlink(missing_ok=True)
        local.write_synced(temporary, json.dumps(said).encode())
        os.replace(temporary, shared / f"part-{number}.json")
        failpoint("checkpoint.described", step)
        return _publish(shared, final, step, part.count)
    except OSError as error:
        raise InfrastructureError(
            f"Part {part.index} of the checkpoint of step {step} cannot be written to {folder}: {error}; free space "
            "there. Training state is unharmed."
        ) from error


def clean(folder: Path, up_to_step: int | None = None) -> None:
    """Remove parts that will never be complete: all, or those of steps up to one that is complete now."""
    for path in list(folder.glob("step-*.parts-*")):
        match = _FOLDER.fullmatch(path.name)
        if match and (up_to_step is None or int(match[1]) <= up_to_step):
            shutil.rmtree(path, ignore_errors=True)


def _publish(shared: Path, final: Path, step: int, count: int) -> Path | None:
    said = []
    for index in range(count):
        try:
            said.append(json.loads((shared / f"part-{index:05d}-of-{count:05d}.json").read_bytes()))
        except FileNotFoundError:
            return None  # the process that writes the last part sees all of them
    blocks: dict[Piece, StoredBlock] = {}
    files: dict[str, Any] = {}
    for part in said:
        for (tensor, dtype, *boxes), number, low, high, xxh3, file, begin in part["blocks"]:
            of = Slice(tensor, dtype, *(tuple(numbers) for numbers in boxes))
            blocks[Piece(of, number, low, high)] = StoredBlock(xxh3, file, begin)
        files |= part["files"]
    made = manifests.make(step, said[0]["skeleton"], said[0]["meta"], blocks, files)
    try:
        local.write_synced(shared / MANIFEST_FILE, manifests.encode(made))
    except FileExistsError:
        return None  # another process was faster
    checkpoint = manifests.read(shared, final.name)
    if checkpoint is None:
        raise CheckpointCorrupt(f"The parts in {shared} do not fit together.")
    if not checkpoint.blocks:  # this also checks that the manifest does not contradict itself
        raise CheckpointCorrupt(f"The parts in {shared} have no tensors.")
    for index in range(count):
        with contextlib.suppress(FileNotFoundError):
            (shared / f"part-{index:05d}-of-{count:05d}.json").unlink()
    local.publish(shared, final)
    clean(final.parent, step)
    return final
