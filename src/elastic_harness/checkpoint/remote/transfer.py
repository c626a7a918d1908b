"""Checkpoints to and from object storage. Data goes first, and is read back and checked. The manifest goes last, and
only if there is none.

Below `step-00000060/` there are `manifest.json` and a folder named after the manifest's own hash, with the files. So
another checkpoint of the same name that is uploaded at the same time cannot replace files that were checked.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.disk import local, retention, tensor_file
from elastic_harness.checkpoint.disk import manifest as manifests
from elastic_harness.checkpoint.disk.manifest import MANIFEST_FILE, Checkpoint, Hashed
from elastic_harness.checkpoint.layout import PIECE_BYTES
from elastic_harness.checkpoint.remote import delta
from elastic_harness.errors import CheckpointCorrupt, ConfigError, InfrastructureError
from elastic_harness.failpoints import failpoint
from elastic_harness.object_store import NotThere, ObjectStore
from elastic_harness.shape import parse_object

REQUESTS = 8  # at once
_STEP = r"step-\d{8,}"
Progress = Callable[[int], None]


def push(
    checkpoint: Checkpoint,
    url: str,
    progress: Progress = lambda nbytes: None,
    *,
    mbps_max: float = 0.0,
    full_every: int = 0,
) -> str:
    """Upload a checkpoint below `url` and return where it is. It has been read back and checked then. After an upload
    that was cut off, files that arrived whole are not sent again. Blocks; `progress(bytes)` is called after each file,
    with the checkpoint's size in all.

    `mbps_max`: megabits per second to send at most, 0: no limit. `full_every`: one of so many checkpoints is sent
    whole, the others as the difference to the one before, if that is on disk here too (0: all whole). Raises
    CheckpointCorrupt if the checkpoint is damaged here, ConfigError if another one of that name is there,
    InfrastructureError if the storage does not answer or changes what is sent.
    """
    local.check(checkpoint)
    store = ObjectStore(f"{url.rstrip('/')}/{checkpoint.path.name}")
    content = (checkpoint.path / MANIFEST_FILE).read_bytes()
    if _manifest(store) is None:
        parent = _parent(checkpoint, url, full_every)
        if parent is not None:
            _push_difference(checkpoint, *parent, store, mbps_max)
            progress(checkpoint.bytes)
        else:
            store.delete([_place(checkpoint.manifest, delta.INDEX_FILE)])  # left by an upload that was cut off
            _push_files(checkpoint, store, progress, mbps_max)
        failpoint("checkpoint.uploading", checkpoint.step)
        store.create(MANIFEST_FILE, content)  # last: without a manifest nothing there is a checkpoint
    if _manifest(store) != content:
        raise ConfigError(f"{store.url} is another checkpoint, with another manifest; push to another place.")
    return store.url


def _push_files(checkpoint: Checkpoint, store: ObjectStore, progress: Progress, mbps_max: float) -> None:
    for name, file in checkpoint.manifest["files"].items():
        if not _whole(checkpoint, store, name):
            failpoint("checkpoint.uploading", checkpoint.step)
            store.put_file(_place(checkpoint.manifest, name), checkpoint.path / name, mbps_max)
            if not _whole(checkpoint, store, name):
                raise _changed(store, name)
        progress(int(file["bytes"]))


def _push_difference(
    checkpoint: Checkpoint, parent: Checkpoint, chain: int, store: ObjectStore, mbps_max: float
) -> None:
    packed = checkpoint.path.parent / f".delta-{checkpoint.path.name}.tmp-{os.getpid()}"
    packed.unlink(missing_ok=True)
    try:
        index = delta.pack(checkpoint, parent, chain, packed)
        place = _place(checkpoint.manifest, delta.DATA_FILE)
        failpoint("checkpoint.uploading", checkpoint.step)
        store.put_file(place, packed, mbps_max)
        with packed.open("rb") as file:
            for low in range(0, index["bytes"], PIECE_BYTES):
                sent = file.read(PIECE_BYTES)
                if store.read(place, low, low + len(sent)) != sent:
                    raise _changed(store, delta.DATA_FILE)
        store.put(_place(checkpoint.manifest, delta.INDEX_FILE), delta.encode_index(index))
    finally:
        packed.unlink(missing_ok=True)


def _changed(store: ObjectStore, name: str) -> InfrastructureError:
    return InfrastructureError(
        f"{store.url}/{name} does not have the bytes that were sent. Try again; if it stays so, the storage or the "
        "network changes data."
    )


def _parent(checkpoint: Checkpoint, url: str, full_every: int) -> tuple[Checkpoint, int] | None:
    """Return the checkpoint to which the difference is sent, and how many differences lead from this one to a whole
    one. Return None if this one is to be sent whole."""
    if full_every < 2:
        return None
    here = {c.manifest["sha256"]: c for c in manifests.newest(checkpoint.path.parent) if c.step < checkpoint.step}
    for name in names(url):
        store = ObjectStore(f"{url.rstrip('/')}/{name}")
        parent = here.get(_said_there(store).get("sha256", ""))
        if parent is not None:
            index = _index(store, parent.manifest)
            chain = 1 + (index["chain"] if index else 0)
            return (parent, chain) if chain < full_every else None
    return None


def _index(store: ObjectStore, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the index that says how a checkpoint in the storage follows from its parent. Return None if it is there
    whole."""
    place = _place(manifest, delta.INDEX_FILE)
    try:
        size = store.size(place)
    except NotThere:
        return None
    try:
        index = parse_object(store.read(place, 0, size))
        name, own = str(index["parent"]["name"]), store.url.rpartition("/")[2]
        if not re.fullmatch(_STEP, name) or int(name[5:]) >= int(own[5:]) or not isinstance(index["chain"], int):
            raise ValueError(f"its parent {name} is none")
        return index
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{store.url}/{place} is damaged: {error}.") from error


def pull(url: str, folder: Path, progress: Progress = lambda nbytes: None) -> Checkpoint:
    """Download a checkpoint, or the newest of several below `url`, into a folder of checkpoints. It appears there when
    it is complete, checked and on disk. Raises ConfigError if there is none or one of that name is here,
    CheckpointCorrupt if it is damaged or incomplete there, InfrastructureError if the storage does not answer or the
    disk refuses."""
    store, name = _find(url)
    final = folder / name
    if final.exists():
        raise ConfigError(f"{final} is here already; remove it, or pull into another folder.")
    temporary = folder / f"{name}.tmp-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        content = _manifest(store)
        if content is None:
            raise NotThere(f"There is no checkpoint at {store.url}.")
        described = _described(content, store.url)
        index = _index(store, described.manifest)
        if index is None:
            parts = list(described.hashed())
            for file, entry in described.manifest["files"].items():
                place, inside = _place(described.manifest, file), [part for part in parts if part.file == file]
                _download(store, place, int(entry["bytes"]), temporary / file, progress, inside)
        else:
            _pull_difference(store, described, index, temporary, progress)
        local.write_synced(temporary / MANIFEST_FILE, content)
        found = manifests.read(temporary, name)
        if found is None:
            raise CheckpointCorrupt(f"{store.url} is no whole checkpoint: its manifest does not fit its files.")
        if index is not None:
            local.check(found)
        local.publish(temporary, final)
    except OSError as error:
        raise InfrastructureError(f"{final} cannot be written: {error}; free space there.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    (checkpoint,) = (c for c in manifests.newest(folder) if c.path == final)
    return checkpoint


def _pull_difference(
    store: ObjectStore, described: Checkpoint, index: Mapping[str, Any], temporary: Path, progress: Progress
) -> None:
    """Fill a folder with the files of a checkpoint that the storage has as a difference. Fetch the parent if it is not
    here."""
    folder, named = temporary.parent, index["parent"]
    packed = temporary / delta.DATA_FILE
    with tempfile.TemporaryDirectory(dir=folder, prefix=".parents-") as fetched:
        parent = next((c for c in manifests.newest(folder) if c.manifest["sha256"] == named["sha256"]), None)
        if parent is None:
            try:
                parent = pull(f"{store.url.rpartition('/')[0]}/{named['name']}", Path(fetched), progress)
            except NotThere as error:
                raise CheckpointCorrupt(f"{store.url} is a difference, and its parent is missing: {error}") from error
        if parent.manifest["sha256"] != named["sha256"]:
            raise CheckpointCorrupt(f"{store.url} is the difference to another {named['name']} than is there.")
        _download(store, _place(described.manifest, delta.DATA_FILE), int(index["bytes"]), packed, progress)
        delta.unpack(index, packed, described, parent, temporary)
        packed.unlink()


def pull_newest(
    url: str, folder: Path, passed_over: Callable[[str, str], None] = lambda where, reason: None
) -> Checkpoint | None:
    """Download the newest checkpoint below `url` that is complete there; return None if there is none.
    `passed_over(where, reason)` is called for each newer one. A folder of the same name here that is not complete is
    set aside. Raises as `pull`."""
    there = set(ObjectStore(url).names())
    for name in _in_order({place.partition("/")[0] for place in there}):
        where = f"{url.rstrip('/')}/{name}"
        if f"{name}/{MANIFEST_FILE}" not in there:
            passed_over(where, f"it has no {MANIFEST_FILE}: its upload was cut off, or it was lost")
            continue
        if (folder / name).exists() and manifests.read(folder / name) is None:
            local.set_aside(folder / name, "damaged")
        try:
            return pull(where, folder)
        except (CheckpointCorrupt, NotThere) as error:
            passed_over(where, str(error).rstrip("."))
    return None


def names(url: str) -> list[str]:
    """Return the checkpoints below a URL, the newest first."""
    found = (re.fullmatch(rf"({_STEP})/{MANIFEST_FILE}", name) for name in ObjectStore(url).names())
    return _in_order(match[1] for match in found if match)


def _in_order(found: Iterable[str]) -> list[str]:
    """Return those that are names of checkpoints, the newest first."""
    return sorted((name for name in found if re.fullmatch(_STEP, name)), key=lambda name: -int(name[5:]))


def prune(url: str, keep_last: int) -> list[str]:
    """Remove checkpoints below a URL, and return their names. The `keep_last` newest stay (0: all stay), and their
    parents, and those from before the last row of non-finite updates. Each checkpoint's manifest is removed first."""
    found = names(url)
    stay = set(found[:keep_last] if keep_last else found)
    if keep_last and len(found) > keep_last:
        meta = _said_there(ObjectStore(f"{url.rstrip('/')}/{found[0]}")).get("meta", {})
        before = retention.before_nonfinite([int(name[5:]) for name in found], meta)
        stay |= {name for name in found if int(name[5:]) in before}
    for name in found:
        if name in stay:
            store = ObjectStore(f"{url.rstrip('/')}/{name}")
            index = _index(store, manifest) if (manifest := _said_there(store)) else None
            stay |= {index["parent"]["name"]} if index else set()
    removed = [name for name in found if name not in stay]
    for name in removed:
        store = ObjectStore(f"{url.rstrip('/')}/{name}")
        store.delete([MANIFEST_FILE])  # first: a checkpoint that is half removed is none
        store.delete(store.names())
    return removed


def _manifest(store: ObjectStore) -> bytes | None:
    """Return the manifest in the storage; None if there is none."""
    try:
        size = store.size(MANIFEST_FILE)
        return store.read(MANIFEST_FILE, 0, size) if size else b""
    except NotThere:
        return None


def _said_there(store: ObjectStore) -> dict[str, Any]:
    """Return the content of the manifest in the storage; nothing if it is missing or makes no sense."""
    try:
        manifest: dict[str, Any] = _described(_manifest(store) or b"", store.url).manifest
        return manifest
    except CheckpointCorrupt:
        return {}


def _find(url: str) -> tuple[ObjectStore, str]:
    """Return the checkpoint at a URL or the newest below it, and its name."""
    url = url.rstrip("/")
    last = url.rpartition("/")[2]
    if re.fullmatch(_STEP, last):
        return ObjectStore(url), last
    for name in names(url):
        return ObjectStore(f"{url}/{name}"), name
    raise ConfigError(f"There is no checkpoint below {url}.")


def _place(manifest: Mapping[str, Any], name: str) -> str:
    """Return where a file is, below the checkpoint's own URL."""
    return f"{str(manifest['sha256'])[:16]}/{name}"


def _described(content: bytes, where: str) -> Checkpoint:
    """Return what a manifest describes. Its files are still to be fetched and checked. Raises CheckpointCorrupt if the
    manifest contradicts itself, or names a file outside its folder."""
    try:
        manifest = parse_object(content)
        checkpoint = Checkpoint(Path(where), int(manifest["step"]), int(manifest["lineage"]), {}, manifest)
        sizes = {str(name): int(file["bytes"]) for name, file in manifest["files"].items()}
        named = {part.file for part in checkpoint.hashed()} | sizes.keys()
        odd = [name for name in named if name not in sizes or not manifests.is_file_name(name)]
        _place(manifest, "")  # has a hash of its own
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"The manifest of {where} is damaged: {error}.") from error
    if odd:
        raise CheckpointCorrupt(f"The manifest of {where} names the file {odd[0]!r}, which is none of a checkpoint.")
    return checkpoint


def _download(
    store: ObjectStore, name: str, size: int, path: Path, progress: Progress, parts: Sequence[Hashed] = ()
) -> None:
    """Fetch an object into a new file, which is on disk then. `parts` of it are checked as they arrive. Raises
    CheckpointCorrupt if the object is missing or differs."""
    try:
        there = store.size(name)
    except NotThere as error:
        raise CheckpointCorrupt(f"{error} The manifest names it.") from error
    if there != size:
        raise CheckpointCorrupt(f"{store.url}/{name} has {there} bytes, its manifest says {size}.")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:

        def fetch(group: tuple[int, int, list[Hashed]]) -> int:
            low, high, inside = group
            content = store.view(name, low, high)
            for part in inside:
                if tensor_file.hash_of(content[part.begin - low : part.begin - low + part.nbytes]) != part.xxh3:
                    end = part.begin + part.nbytes
                    raise CheckpointCorrupt(
                        f"{store.url}/{name} is damaged between {part.begin} and {end}, in {part.what}."
                    )
            return os.pwrite(descriptor, content, low)

        with ThreadPoolExecutor(REQUESTS, thread_name_prefix="checkpoint-pull") as pool:
            for nbytes in pool.map(fetch, _groups(size, parts)):
                progress(nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _groups(size: int, parts: Sequence[Hashed]) -> Iterator[tuple[int, int, list[Hashed]]]:
    """Yield ranges of a file of about `PIECE_BYTES`, each with the parts in it. No range cuts a part."""
    low, inside = 0, list[Hashed]()
    for part in sorted(parts, key=lambda part: part.begin):
        if inside and part.begin + part.nbytes - low > PIECE_BYTES:
            yield low, part.begin, inside
            low, inside = part.begin, []
        inside.append(part)
    end = max((part.begin + part.nbytes for part in inside), default=low)
    if inside:
        yield low, end, inside
        low = end
    for begin in range(low, size, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, size), []


def _whole(checkpoint: Checkpoint, store: ObjectStore, name: str) -> bool:
    """Return whether a file in the storage is as it is here. The file is read back for that."""
    place = _place(checkpoint.manifest, name)
    try:
        if store.size(place) != int(checkpoint.manifest["files"][name]["bytes"]):
            return False
    except NotThere:
        return False

    def right(part: Hashed) -> bool:
        return tensor_file.hash_of(store.read(place, part.begin, part.begin + part.nbytes)) == part.xxh3

    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="checkpoint-push") as pool:
        return all(pool.map(right, (part for part in checkpoint.hashed() if part.file == name)))
