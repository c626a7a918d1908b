"""Text to token ids. Byte-level needs nothing; tiktoken and Hugging Face's tokenizers are used where they are
installed.

If a document contains the text of a special token, that is encoded as text. It never becomes the special token.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from elastic_harness.errors import ConfigError

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BYTES = 256


class Tokenizer(Protocol):
    """identity: what an index remembers of the tokenizer; equal only for tokenizers that give equal ids. file: what is
    needed to load it again, as text (empty: its identity is enough). raw: it takes any bytes, not only UTF-8."""

    vocab_size: int
    eot_id: int
    identity: dict[str, Any]
    file: str
    raw: bool

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        """Return the ids of each text, without an end-of-text."""
        ...

    def decode(self, ids: npt.NDArray[Any]) -> str: ...


class ByteTokenizer:
    """Every byte is a token; 256 ends a document."""

    vocab_size = BYTES + 1
    eot_id = BYTES
    identity: dict[str, Any] = {"kind": "bytes"}
    file = ""
    raw = True

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: npt.NDArray[Any]) -> str:
        return ids[ids < BYTES].astype(np.uint8).tobytes().decode("utf-8", "replace")


class TiktokenTokenizer:
    """One of tiktoken's encodings, by its name: `tiktoken:o200k_base`, or one that a tiktoken plugin adds."""

    file = ""
    raw = False

    def __init__(self, name: str, same_as: Any = None) -> None:
        """`same_as`: an encoding that must be tiktoken's of this name, because the index remembers only the name."""
        tiktoken = _import("tiktoken")
        try:
            self._encoding = tiktoken.get_encoding(name)
        except ValueError as error:
            raise ConfigError(f"tiktoken has no encoding {name!r}; it has {tiktoken.list_encoding_names()}.") from error
        except OSError as error:  # its client's errors are of this kind
            raise ConfigError(
                f"tiktoken keeps no copy of the encoding {name!r} here, and cannot download it ({_short(error)}). Load "
                f"it once on a machine with a network: TIKTOKEN_CACHE_DIR=FOLDER python -c 'import tiktoken; "
                f'tiktoken.get_encoding("{name}")\'. Copy that folder here, or give a tokenizer.json.'
            ) from error
        own = self._encoding
        if same_as is not None and (own.token_byte_values(), own.special_tokens_set, own.n_vocab) != (
            same_as.token_byte_values(), same_as.special_tokens_set, same_as.n_vocab
        ):  # fmt: skip
            raise ConfigError(
                f"This encoding is called {name!r}, but tiktoken's of that name is another one; an index remembers the "
                "name alone. Register yours as a tiktoken plugin, or give a tokenizer.json."
            )
        self.vocab_size = self._encoding.n_vocab
        self.eot_id = self._encoding.eot_token
        self.identity = {"kind": "tiktoken", "name": name}

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        encode = self._encoding.encode_to_numpy  # with no special token allowed, and none an error
        return [encode(text.decode(), allowed_special=set(), disallowed_special=()) for text in texts]

    def decode(self, ids: npt.NDArray[Any]) -> str:
        return str(self._encoding.decode(ids.tolist()))


class HuggingFaceTokenizer:
    """A `tokenizer.json`, from a file, a folder, the hub, or trained here."""

    raw = False

    def __init__(self, file: str, eot: str | None = None) -> None:
        self._tokenizer = _import("tokenizers").Tokenizer.from_str(file)
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.file = file
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocab_size, max(vocabulary.values(), default=0) + 1)  # ids may have holes
        names = (eot,) if eot else END_OF_TEXT
        found = next((name for name in names if name in vocabulary), None)
        if found is None:
            raise ConfigError(
                f"The tokenizer has no token {' or '.join(names)} to end a document with; name it with --eot TOKEN."
            )
        self.eot_id = vocabulary[found]
        digest = hashlib.sha256(file.encode()).hexdigest()
        self.identity = {"kind": "huggingface", "sha256": digest, "eot": found}

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        decoded = [text.decode() for text in texts]
        return [np.array(e.ids, np.uint32) for e in self._tokenizer.encode_batch(decoded, add_special_tokens=False)]

    def decode(self, ids: npt.NDArray[Any]) -> str:
        return str(self._tokenizer.decode(ids.tolist()))


def load(spec: str, eot: str | None = None) -> Tokenizer:
    """Return the tokenizer that is named: `bytes`, `tiktoken:NAME`, a tokenizer.json, a folder with one, or a name on
    the Hugging Face hub. Raises ConfigError if there is no such tokenizer."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("tiktoken:"):
        return TiktokenTokenizer(spec.removeprefix("tiktoken:"))
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        return HuggingFaceTokenizer(path.read_text(), eot)
    if path.suffix or path.exists() or spec.startswith((".", "/", "~")):
        raise ConfigError(f"The tokenizer {spec} does not exist; give a tokenizer.json or a folder that has one.")
    try:
        return HuggingFaceTokenizer(_import("tokenizers").Tokenizer.from_pretrained(spec).to_str(), eot)
    except ConfigError:
        raise
    except Exception as error:  # whatever the hub's client raises
        raise ConfigError(
            f"The tokenizer {spec!r} is neither a file nor could it be loaded from the Hugging Face hub ({error}). "
            "Give bytes, tiktoken:NAME, a tokenizer.json or a name on the hub."
        ) from error


def chosen(given: object) -> Tokenizer:
    """Return the tokenizer that is given by name or as an object: one of ours, of tiktoken's, of tokenizers', or a fast
    one of transformers. Raises ConfigError for anything else, because an index has to say how its ids were made."""
    if isinstance(given, (str, Path)):
        return load(str(given))
    if all(hasattr(given, name) for name in ("identity", "vocab_size", "eot_id", "file", "raw", "encode", "decode")):
        return cast(Tokenizer, given)
    if isinstance(name := getattr(given, "name", None), str) and hasattr(given, "encode_to_numpy"):
        return TiktokenTokenizer(name, given)
    library_s = getattr(given, "backend_tokenizer", given)  # what a fast tokenizer of transformers wraps
    if hasattr(library_s, "to_str"):
        return HuggingFaceTokenizer(library_s.to_str(), getattr(given, "eos_token", None))
    raise ConfigError(
        f"tokenizer is {type(given).__name__}; give bytes, tiktoken:NAME, a tokenizer.json or its folder, a name on "
        "the Hugging Face hub, or an object of tiktoken, of tokenizers, or a fast one of transformers."
    )


def restore(identity: dict[str, Any], file: str) -> Tokenizer:
    """Return the tokenizer that an index was built with. Raises ConfigError if it is not available."""
    match identity.get("kind"):
        case "bytes":
            return ByteTokenizer()
        case "tiktoken":
            return TiktokenTokenizer(identity["name"])
        case "huggingface":
            return HuggingFaceTokenizer(file, identity["eot"])
        case kind:
            raise ConfigError(
                f"The index was built with a tokenizer of kind {kind!r}; update elastic-harness to read it."
            )


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Return a byte-level BPE of `vocab_size` entries learned from these texts. It can encode every text."""
    if vocab_size <= BYTES:
        raise ConfigError(f"--train-bpe is {vocab_size}; it must be more than {BYTES}, which the bytes alone take.")
    library = _import("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(tokenizer.to_str())


def _short(error: BaseException) -> str:
    """Return the innermost reason of an error that wraps others."""
    inner = getattr(error.args[0], "reason", None) if error.args else None
    text = str(inner if inner is not None else error)
    return text.rsplit(": ", 1)[-1]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"This tokenizer needs the package {name}: pip install 'elastic-harness[tokenizers]'."
        ) from error
