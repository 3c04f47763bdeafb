"""Text for the probes: GPT-2 tokens of Wikipedia and Wikinews, small enough to travel.

    NRGPT_SHARED=... python experiments/descent/prepare.py --to gpu_data

Documents of all sources in one seeded order: the first ones are the validation split, the next
ones the training stream, each followed by 50256. Written as one file, xz over all low bytes and
then all high bytes (they compress apart better than together).
"""

import argparse
import hashlib
import json
import lzma
import os
import random
from pathlib import Path
from typing import Any

import numpy as np

SEPARATOR = 50256
SOURCES = ("wikinews/wikinews.txt.xz", "wikipedia/wiki-0.txt.xz")


def read_documents(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        parts = file.read().split("\n<|endoftext|>\n")
    return [part for part in (p.strip("\n") for p in parts) if part]


def load_encoding(ranks: Path) -> Any:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    return tiktoken.Encoding(
        "gpt2",
        pat_str=pattern,
        mergeable_ranks=load_tiktoken_bpe(str(ranks)),
        special_tokens={"<|endoftext|>": SEPARATOR},
    )


def pack(tokens: np.ndarray) -> bytes:
    planes = tokens.astype("<u2").view(np.uint8).reshape(-1, 2).T
    return lzma.compress(planes.tobytes(), preset=6)


def unpack(data: bytes) -> np.ndarray:
    planes = np.frombuffer(lzma.decompress(data), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view("<u2").ravel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=os.environ.get("NRGPT_SHARED"))
    parser.add_argument("--to", type=Path, default=Path("gpu_data"))
    parser.add_argument("--train", type=int, default=17_000_000)
    parser.add_argument("--validation", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.shared is None:
        parser.error("--shared or NRGPT_SHARED: the folder that holds data/")
    data = Path(args.shared) / "data"
    encoding = load_encoding(data / "gpt2_bpe" / "gpt2.tiktoken")
    documents = [d for name in SOURCES for d in read_documents(data / name)]
    random.Random(args.seed).shuffle(documents)
    splits: dict[str, np.ndarray] = {}
    position = 0
    for name, wanted in (("val", args.validation), ("train", args.train)):
        parts: list[int] = []
        while len(parts) < wanted:
            batch = documents[position : position + 64]
            if not batch:
                parser.error(f"{name}: only {len(parts)} tokens of {wanted}")
            position += len(batch)
            for tokens in encoding.encode_ordinary_batch(batch, num_threads=2):
                parts += [*tokens, SEPARATOR]
        splits[name] = np.array(parts[:wanted], np.uint16)
    args.to.mkdir(parents=True, exist_ok=True)
    about = {"sources": SOURCES, "seed": args.seed, "documents": position}
    for name, tokens in splits.items():
        packed = pack(tokens)
        assert np.array_equal(unpack(packed), tokens)
        (args.to / f"{name}.xz").write_bytes(packed)
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        about[name] = {"tokens": len(tokens), "bytes": len(packed), "sha256": digest}
    (args.to / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
