"""`elastic-harness index build|pack|info|verify|head`: make a token index, and look into one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.data import index_builder, tokenizers
from elastic_harness.data.packing import pack
from elastic_harness.data.readers import find_inputs
from elastic_harness.data.token_index import TokenIndexFile, copy_with_packing
from elastic_harness.data.tokenizers import Tokenizer
from elastic_harness.errors import EXIT_INTERRUPTED, EXIT_SUCCESS, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the subcommands, and return the exit code. Raises HarnessError."""
    parser = argparse.ArgumentParser(prog="elastic-harness index", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    building = commands.add_parser(
        "build",
        help="tokenize files into an index",
        description="Build a token index from JSONL, plain text or Parquet files (.gz, .zst too), folders or patterns.",
        epilog="example: elastic-harness index build data/*.jsonl -o index.bin --train-bpe 32000 --processes 8",
    )
    _add_build_arguments(building)
    building.set_defaults(run=build_index)
    packing = commands.add_parser(
        "pack",
        help="put whole documents together into windows, for documents='pack'",
        description="Write the same index with a best-fit packing: whole documents put together into windows.",
        epilog="example: elastic-harness index pack index.bin -o packed.bin --seq-length 1024",
    )
    packing.add_argument("index", metavar="INDEX")
    packing.add_argument("-o", "--output", required=True, metavar="FILE", help="the index to write")
    packing.add_argument("--seq-length", type=int, required=True, metavar="S", help="tokens in a window")
    packing.add_argument(
        "--validation-fraction", type=float, default=0.0, metavar="F", help="of the documents, held out (default: 0)"
    )
    packing.set_defaults(run=pack_index)
    for name, run, summary in (
        ("info", info, "what an index holds, as JSON"),
        ("verify", verify, "read the whole index and check every hash"),
        ("head", head, "the text of the first documents"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("index", metavar="INDEX")
        command.set_defaults(run=run)
        if name == "head":
            command.add_argument("-n", type=int, default=3, metavar="N", help="how many documents (default: 3)")
            command.add_argument("--tokens", type=int, default=200, help="at most so many of each (default: 200)")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="as one JSON object (info always is)")
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


def _say(arguments: argparse.Namespace, words: str, facts: Mapping[str, Any]) -> int:
    """Print what was done, as it was asked for."""
    print(json.dumps(facts) if arguments.json else words)
    return EXIT_SUCCESS


def _add_build_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("inputs", nargs="+", metavar="INPUT", help="a file, a folder, or a pattern in quotes")
    option("-o", "--output", required=True, metavar="FILE", help="the index to write")
    option("--text-key", default="text", metavar="KEY", help="JSONL key or Parquet column of the text (default: text)")
    option(
        "--tokenizer",
        default="bytes",
        metavar="T",
        help="bytes (default), tiktoken:NAME, a tokenizer.json, a folder with one, or a name on the Hugging Face hub",
    )
    option("--train-bpe", type=int, metavar="N", help="learn a byte-level BPE of N entries from these files instead")
    option("--eot", metavar="TOKEN", help="the token that ends a document (default: the tokenizer's own)")
    option("--processes", type=int, default=os.cpu_count() or 1, metavar="P", help="default: one for each core")
    option(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="fraction of bad documents that may be left out (default: 0, any is an error)",
    )


def build_index(arguments: argparse.Namespace) -> int:
    try:
        return _build(arguments)
    except KeyboardInterrupt:
        print("interrupted; the parts that are finished are kept: the same command goes on there", file=sys.stderr)
        return EXIT_INTERRUPTED


def _build(arguments: argparse.Namespace) -> int:
    from elastic_harness.commands.progress_bar import ProgressBar

    if arguments.processes < 1:
        raise ConfigError(f"--processes is {arguments.processes}; it must be at least 1.")
    if not 0 <= arguments.max_bad_fraction <= 1:
        raise ConfigError(f"--max-bad-fraction is {arguments.max_bad_fraction}; it must lie between 0 and 1.")
    paths = find_inputs(arguments.inputs)
    if arguments.train_bpe:
        texts = index_builder.first_texts(paths, arguments.text_key)
        tokenizer: Tokenizer = tokenizers.train_bpe(texts, arguments.train_bpe)
    else:
        tokenizer = tokenizers.load(arguments.tokenizer, arguments.eot)
    total = sum(path.stat().st_size for path in paths)
    with ProgressBar.of_bytes("tokenizing", total) as shown:
        report = index_builder.build(
            arguments.inputs,
            arguments.output,
            tokenizer=tokenizer,
            text_key=arguments.text_key,
            processes=arguments.processes,
            max_bad_fraction=arguments.max_bad_fraction,
            progress=shown.done,
        )
    for problem in report.problems[: index_builder.SHOWN_PROBLEMS]:
        print(f"left out: {problem}", file=sys.stderr)
    fingerprint = TokenIndexFile(report.path).fingerprint
    left_out = f"; left out: {report.bad} bad, {report.empty} empty" if report.bad or report.empty else ""
    words = (
        f"{report.path}: {report.documents:,} documents, {report.tokens:,} tokens of a vocabulary of "
        f"{tokenizer.vocab_size:,}, in {report.seconds:.1f} s "
        f"({report.input_bytes / 1e6 / max(report.seconds, 1e-9):.0f} MB/s){left_out}\n"
        f"fingerprint {fingerprint}"
    )
    facts = {name: value for name, value in vars(report).items() if name != "path"}
    facts |= {"path": str(report.path), "vocab_size": tokenizer.vocab_size, "fingerprint": fingerprint}
    return _say(arguments, words, facts)


def info(arguments: argparse.Namespace) -> int:
    index = TokenIndexFile(arguments.index)
    lengths = [int(index.documents[d + 1] - index.documents[d]) for d in range(min(index.n_documents, 100_000))]
    facts = {
        "path": str(index.path),
        "bytes": index.nbytes,
        "tokens": len(index),
        "documents": index.n_documents,
        "tokens_per_document": {"min": min(lengths), "median": sorted(lengths)[len(lengths) // 2], "max": max(lengths)},
        "dtype": str(index.tokens.dtype),
        "vocab_size": index.vocab_size,
        "eot_id": index.eot_id,
        "tokenizer": index.tokenizer,
        "files": len(index.names),
        "packing": index.header.get("packing"),
        "fingerprint": index.fingerprint,
    }
    print(json.dumps(facts, indent=1))
    return EXIT_SUCCESS


def pack_index(arguments: argparse.Namespace) -> int:
    from elastic_harness.commands.progress_bar import ProgressBar

    if not 0 <= arguments.validation_fraction < 1:
        raise ConfigError(
            f"--validation-fraction is {arguments.validation_fraction}, but must be at least 0 and below 1."
        )
    index = TokenIndexFile(arguments.index)
    output = Path(arguments.output)
    if index.remote:
        raise ConfigError(f"{index.path} is remote; copy it here to pack it.")
    if output.exists() and output.samefile(index.path):
        raise ConfigError(f"The output {output} is the input; name another file with -o.")
    with ProgressBar("verifying", index.nbytes) as shown:
        index.verify(shown.done)
        shown.update(shown.task, description="packing", completed=0, total=None)
        packing = pack(
            index.documents,
            index.keys,
            arguments.seq_length,
            arguments.validation_fraction,
            lambda done, of: shown.update(shown.task, completed=done, total=of),
        )
        shown.update(shown.task, description="writing", total=None)
        copy_with_packing(index, output, packing)
    cut = len(packing.starts) - index.n_documents
    words = (
        f"{output}: {packing.n_bins:,} windows of {packing.seq_length} tokens, "
        f"{packing.n_bins - packing.n_train:,} of them held out, {packing.filled:.2%} filled; {index.n_documents:,} "
        f"documents, {cut:,} cuts in those longer than a window"
    )
    facts = {
        "path": str(output),
        "windows": packing.n_bins,
        "held_out": packing.n_bins - packing.n_train,
        "seq_length": packing.seq_length,
        "filled": packing.filled,
        "documents": index.n_documents,
        "cuts": cut,
    }
    return _say(arguments, words, facts)


def verify(arguments: argparse.Namespace) -> int:
    from elastic_harness.commands.progress_bar import ProgressBar

    index = TokenIndexFile(arguments.index)
    with ProgressBar("verifying", index.nbytes) as shown:
        index.verify(shown.done)
    words = f"{index.path}: all of {len(index):,} tokens in {index.n_documents:,} documents are as they were written"
    return _say(arguments, words, {"path": str(index.path), "tokens": len(index), "documents": index.n_documents})


def head(arguments: argparse.Namespace) -> int:
    index = TokenIndexFile(arguments.index)
    tokenizer = tokenizers.restore(index.tokenizer, index.tokenizer_file())
    words, documents = list[str](), []
    for number in range(min(arguments.n, index.n_documents)):
        tokens, file = index.document(number), index.names[int(index.sources[number])]
        shown = tokens[: arguments.tokens]
        text, whole = tokenizer.decode(shown[shown != index.eot_id]), len(shown) == len(tokens)
        words += [f"--- document {number}, {len(tokens):,} tokens, from {file}", text if whole else f"{text} …"]
        documents.append({"document": number, "tokens": len(tokens), "file": file, "text": text, "whole": whole})
    return _say(arguments, "\n".join(words), {"path": str(index.path), "documents": documents})
