"""`elastic-harness checkpoint ls|show|verify|diff|export|import|push|pull|prune`: look into checkpoints, move them.

WHERE is a run's folder or its id under runs/, a folder of checkpoints, or one checkpoint; where one is needed, the
newest of several is meant.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.disk import local, retention
from elastic_harness.checkpoint.disk import manifest as manifests
from elastic_harness.checkpoint.disk.manifest import MANIFEST_FILE, Checkpoint
from elastic_harness.checkpoint.disk.retention import Retention
from elastic_harness.checkpoint.layout import Piece
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.errors import CheckpointCorrupt, ConfigError
from elastic_harness.runs.named import places

EXIT_DAMAGED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the subcommands, and return the exit code. Raises HarnessError."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, run, summary in (
        ("ls", ls, "the checkpoints, newest first"),
        ("show", show, "one checkpoint as JSON: its tensors, files and what else it holds"),
        ("verify", verify, f"read every byte and check every hash; exit code {EXIT_DAMAGED} if one is wrong"),
        ("diff", diff, "which tensors differ between two checkpoints, by their hashes"),
        ("export", export, "the weights as safetensors, torch.save, PyTorch DCP or a Hugging Face folder"),
        ("import", import_, "make a checkpoint of a file or folder of one of these formats"),
        ("push", push, "upload one to object storage, and read it back to check it"),
        ("pull", pull, "download one, or the newest of several, and check it"),
        ("prune", prune, "remove all but the newest"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("where", metavar={"pull": "URL", "import": "SOURCE"}.get(name, "WHERE"))
        command.set_defaults(run=run)
        if name == "push":
            command.add_argument("url", metavar="URL", help="s3://bucket/prefix, gs://…, az://…; it goes below that")
            command.add_argument("--mbps-max", type=float, default=0.0, help="megabits per second at most")
            command.add_argument("--full-every", type=int, default=0, help="of so many one whole, else differences")
        if name == "pull":
            command.add_argument("folder", metavar="FOLDER", help="a run, or a folder of checkpoints")
        if name == "diff":
            command.add_argument("other", metavar="OTHER")
        if name == "export":
            command.add_argument("output", metavar="OUTPUT", help="a name ending in .safetensors or .pt, or a folder")
            command.add_argument("--all", action="store_true", help="optimizer and the rest too, under their own names")
        if name == "import":
            command.add_argument("folder", metavar="FOLDER", help="a run, or a folder of checkpoints")
            command.add_argument("--step", type=int, default=0, help="the step it is to be of (default: 0)")
        if name in ("export", "import"):
            choices = ("safetensors", "torch", "dcp", "hf")
            command.add_argument("--format", choices=choices, help="default: what the name or content says")
        if name == "prune":
            command.add_argument("--keep-last", type=int, required=True, metavar="N", help="how many stay, at least 1")
            command.add_argument("--keep-every", type=int, default=0, metavar="N", help="and each N-th step")
            command.add_argument("--keep-best", type=int, default=0, metavar="N", help="and the N of the lowest loss")
            command.add_argument("--dry-run", action="store_true", help="only say what would go")
        if name != "show":  # which is JSON in any case
            command.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


def ls(arguments: argparse.Namespace) -> int:
    found = _all(arguments.where)
    rows: list[dict[str, Any]] = [
        {
            "path": str(checkpoint.path),
            "step": checkpoint.step,
            "lineage": checkpoint.lineage,
            "bytes": checkpoint.bytes,
            "own_bytes": checkpoint.own_bytes,
            "tensors": len(checkpoint.manifest["tensors"]),
            "written": (checkpoint.path / MANIFEST_FILE).stat().st_mtime,
        }
        for checkpoint in found
    ]
    if arguments.json:
        print(json.dumps(rows))
        return 0
    print(f"{'step':>10}  {'lineage':>7}  {'MB':>10}  {'MB own':>10}  {'written':<19}  path")
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written"]))
        print(
            f"{row['step']:>10}  {row['lineage']:>7}  {row['bytes'] / 1e6:>10.1f}  {row['own_bytes'] / 1e6:>10.1f}  "
            f"{when}  {row['path']}"
        )
    return 0


def show(arguments: argparse.Namespace) -> int:
    checkpoint = _one(arguments.where)
    manifest = checkpoint.manifest
    slices = {piece.slice for piece in checkpoint.blocks}
    tensors = {
        name: {"dtype": tensor["dtype"], "shape": tensor["shape"], "slices": sum(of.tensor == name for of in slices)}
        for name, tensor in manifest["tensors"].items()
    }
    print(json.dumps({"path": str(checkpoint.path), **manifest, "tensors": tensors}, indent=1))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    from elastic_harness.commands.progress_bar import ProgressBar

    found, damaged = _all(arguments.where), dict[str, str]()
    with ProgressBar("verifying", sum(checkpoint.bytes for checkpoint in found)) as shown:
        for checkpoint in found:
            try:
                local.check(checkpoint, shown.done)
                shown.console.print(f"{checkpoint.path}: whole", highlight=False, soft_wrap=True)
            except CheckpointCorrupt as error:
                damaged[str(checkpoint.path)] = str(error)
                shown.console.print(f"{checkpoint.path}: DAMAGED: {error}", highlight=False, soft_wrap=True)
    whole = [str(checkpoint.path) for checkpoint in found if str(checkpoint.path) not in damaged]
    _say(arguments, f"{len(whole)} of {len(found)} checkpoints are whole", {"whole": whole, "damaged": damaged})
    return EXIT_DAMAGED if damaged else 0


def diff(arguments: argparse.Namespace) -> int:
    first, second = (_contents(_one(where)) for where in (arguments.where, arguments.other))
    only_first, only_second = sorted(set(first) - set(second)), sorted(set(second) - set(first))
    differing = [name for name in sorted(set(first) & set(second)) if first[name] != second[name]]
    same = len(set(first) & set(second)) - len(differing)
    if arguments.json:
        found = {"only_first": only_first, "only_second": only_second, "differing": differing, "same": same}
        print(json.dumps(found))
    else:
        for mark, names in (("<", only_first), (">", only_second), ("≠", differing)):
            for name in names:
                print(f"{mark} {name}")
        alone = len(only_first) + len(only_second)
        print(f"{same} tensors are the same, {len(differing)} differ, {alone} are in one of the two")
    return EXIT_DAMAGED if differing or only_first or only_second else 0


def export(arguments: argparse.Namespace) -> int:
    from elastic_harness.checkpoint import convert

    checkpoint, output = _one(arguments.where), Path(arguments.output)
    form = arguments.format or convert.guess_format(output)
    count = convert.export(checkpoint, output, form, everything=arguments.all)
    told = {"path": str(output), "tensors": count, "checkpoint": str(checkpoint.path)}
    return _say(arguments, f"{output}: {count} tensors of {checkpoint.path}", told)


def import_(arguments: argparse.Namespace) -> int:
    from elastic_harness.checkpoint import convert

    source = Path(arguments.where)
    form = arguments.format or convert.guess_format(source)
    path = convert.import_from(source, _folder_of(arguments.folder), arguments.step, form)
    return _say(arguments, f"{path}: made of {source}", {"path": str(path), "source": str(source)})


def push(arguments: argparse.Namespace) -> int:
    from elastic_harness.commands.progress_bar import ProgressBar

    checkpoint = _one(arguments.where)
    with ProgressBar.of_bytes("uploading", checkpoint.bytes) as shown:
        where = transfer.push(
            checkpoint, arguments.url, shown.done, mbps_max=arguments.mbps_max, full_every=arguments.full_every
        )
    told = {"url": where, "bytes": checkpoint.bytes}
    return _say(arguments, f"{where}: uploaded and checked, {checkpoint.bytes / 1e6:.1f} MB", told)


def pull(arguments: argparse.Namespace) -> int:
    from elastic_harness.commands.progress_bar import ProgressBar

    with ProgressBar.of_bytes("downloading", None) as shown:
        checkpoint = transfer.pull(arguments.where, _folder_of(arguments.folder), shown.done)
    told = {"path": str(checkpoint.path), "bytes": checkpoint.bytes}
    return _say(arguments, f"{checkpoint.path}: downloaded and checked, {checkpoint.bytes / 1e6:.1f} MB", told)


def prune(arguments: argparse.Namespace) -> int:
    if arguments.keep_last < 1:
        raise ConfigError(f"--keep-last is {arguments.keep_last}, but at least 1 must stay.")
    policy = Retention(arguments.keep_last, arguments.keep_every, arguments.keep_best)
    found = _all(arguments.where)
    if arguments.dry_run:
        removed = [checkpoint.path for checkpoint in retention.superfluous(found, policy)]
    else:
        removed = retention.prune(found[0].path.parent, policy)
    lines = [f"{'would remove' if arguments.dry_run else 'removed'} {path}" for path in removed]
    if lines or arguments.json:
        _say(arguments, "\n".join(lines), {"removed": list(map(str, removed)), "dry_run": arguments.dry_run})
    return 0


def _say(arguments: argparse.Namespace, words: str, fields: dict[str, Any]) -> int:
    """Print what was done, as it was asked for."""
    print(json.dumps(fields) if arguments.json else words)
    return 0


def _contents(checkpoint: Checkpoint) -> dict[str, dict[Piece, str]]:
    """Return each tensor's pieces with their hashes."""
    found: dict[str, dict[Piece, str]] = {}
    for piece, block in checkpoint.blocks.items():
        found.setdefault(piece.slice.tensor, {})[piece] = block.xxh3
    return found


def _folder_of(given: str) -> Path:
    """Return a run's folder of checkpoints, or a folder of checkpoints. A folder that does not exist yet is returned as
    named."""
    folder = next((path for path in places(given) if path.exists()), Path(given))
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def _one(where: str) -> Checkpoint:
    return _all(where)[0]


def _all(where: str) -> list[Checkpoint]:
    """Return the valid checkpoints there, the newest first, at least one. Say which folders are passed over."""
    path = next((p for p in places(where) if p.exists()), None)
    if path is None:
        raise ConfigError(f"{where} does not exist; give a run, a folder of checkpoints or a checkpoint.")
    path = path.resolve() if path.is_symlink() else path  # latest and best
    if (path / MANIFEST_FILE).exists():
        checkpoint = manifests.read(path)
        if checkpoint is None:
            raise CheckpointCorrupt(f"{path} is no whole checkpoint: {manifests.why_not(path)}.")
        return [checkpoint]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = manifests.newest(folder)
    known = {checkpoint.path.name for checkpoint in found}
    for entry in sorted(folder.glob("step-*")):
        if entry.name not in known:
            print(f"passed over, not whole: {entry}: {manifests.why_not(entry)}", file=sys.stderr)
    if not found:
        raise ConfigError(f"There is no checkpoint in {folder}.")
    return found
