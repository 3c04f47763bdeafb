"""Token shards: a dataset is a folder of memory-mapped files, checked when it is opened.

    manifest.json      vocabulary, tokenizer, number of tokens and checksums of each file
    train-00000.bin    little-endian tokens: uint16, or uint32 for more than 65,536 symbols
    val-00000.bin

The folder gets its name only when it is complete. Errors name the file and the byte.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..check import check, check_choice
from ..files import InUse, flush, locked, make_folder, open_ours
from .order import Order, places
from .tokenizer import Tokenizer, load_tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
CHECKSUM_BLOCK = 1 << 20  # bytes per checksum: few enough to locate a fault


class DataError(ValueError):
    """Unusable data. The message names the file, the place in it, and what to do."""


def fault(path: Path, offset: int, problem: str) -> DataError:
    again = "prepare the data again, in another folder or after removing this one"
    return DataError(f"{path}: byte {offset}: {problem}; {again}")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def token_format(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.spec(),
        "tokenizer_sha256": tokenizer.fingerprint(),
    }


def refuse_existing(folder: Path) -> None:
    if folder.exists():
        ours = "; delete it first, or" if (folder / MANIFEST).is_file() else " and is no dataset;"
        raise FileExistsError(f"{folder} exists already{ours} choose another folder")


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it for this process. The lock ends with the process."""
    lock = folder.with_name(f".{folder.name}.lock")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(lock):
            try:
                make_folder(folder)
                yield
            except OSError as error:
                if error.errno and error.filename is None:
                    error.filename = str(folder)  # the error of a full disk names no file
                raise
    except InUse:
        raise BlockingIOError(f"{folder}: another process is preparing this data") from None


def write_dataset(
    folder: Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Iterable[np.ndarray]],
    *,
    source: Mapping[str, Any],
    extra_files: Mapping[str, bytes] = {},
    shard_tokens: int = 100_000_000,
) -> None:
    """Write a dataset. Whatever interrupts this, ``folder`` is complete or does not exist."""
    folder = folder.absolute()
    refuse_existing(folder)
    check(shard_tokens > 0, "shard_tokens", shard_tokens, "positive")
    writing = folder.with_name(folder.name + ".writing")
    with working_folder(writing):
        try:
            refuse_existing(folder)  # again: another process may have finished it meanwhile
            for left_by_a_killed_run in writing.iterdir():
                left_by_a_killed_run.unlink()
            written = {
                split: write_split(writing, split, pieces, tokenizer.vocab_size, shard_tokens)
                for split, pieces in splits.items()
            }
            beside = {**tokenizer.companions(), **extra_files}
            extra = {name: write_blocks(writing / name, [b]) for name, b in beside.items()}
            manifest = token_format(tokenizer) | {
                "splits": written, "extra_files": extra, "source": dict(source),
            }  # fmt: skip
            write_blocks(writing / MANIFEST, [json.dumps(manifest, indent=1).encode()])
            flush(writing)
            os.rename(writing, folder)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
    flush(folder.parent)


def write_split(
    folder: Path, split: str, pieces: Iterable[np.ndarray], vocab_size: int, shard_tokens: int
) -> list[dict[str, Any]]:
    """Write one split, shard by shard. Returns its entry for the manifest."""
    shards = []
    blocks = token_blocks(split, pieces, vocab_size, shard_tokens)
    for number, shard in itertools.groupby(blocks, key=lambda block: block[0]):
        path = folder / f"{split}-{number:05d}.bin"
        crc32 = write_blocks(path, (block for _, block in shard))
        tokens = path.stat().st_size // token_dtype(vocab_size).itemsize
        shards.append({"file": path.name, "tokens": tokens, "crc32": crc32})
    if not shards:
        raise ValueError(f"split {split!r} has no tokens: give it some, or leave it out")
    return shards


def token_blocks(
    split: str, pieces: Iterable[np.ndarray], vocab_size: int, shard_tokens: int
) -> Iterator[tuple[int, bytes]]:
    """The tokens as (shard number, block of bytes for one checksum)."""
    # Gathered before they are checked: there may be millions of tiny pieces.
    dtype = token_dtype(vocab_size)
    gathered = np.empty(CHECKSUM_BLOCK // dtype.itemsize, np.int64)
    filled, done = 0, 0

    def block() -> tuple[int, bytes]:
        tokens = gathered[:filled]
        if (wrong := first_outside(tokens, vocab_size)) is not None:
            where = f"split {split!r}: position {done + wrong}: token {tokens[wrong]}"
            raise ValueError(f"{where} is not in the vocabulary of {vocab_size}")
        return done // shard_tokens, tokens.astype(dtype).tobytes()

    for piece in pieces:
        if piece.dtype.kind not in "iu":
            raise ValueError(f"split {split!r}: tokens must be integers, not {piece.dtype}")
        taken = 0
        while taken < len(piece):
            room = min(len(gathered), shard_tokens - done % shard_tokens)
            part = piece[taken : taken + room - filled]
            gathered[filled : filled + len(part)] = part
            filled, taken = filled + len(part), taken + len(part)
            if filled == room:
                yield block()
                filled, done = 0, done + filled
    if filled:
        yield block()


def first_outside(tokens: np.ndarray, vocab_size: int) -> int | None:
    """The position of the first token that is not in the vocabulary."""
    if tokens.min() >= 0 and tokens.max() < vocab_size:
        return None
    return int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])


def write_blocks(path: Path, blocks: Iterable[bytes]) -> list[int]:
    """Write a new file to the disk. Returns the checksum of each block."""
    crc32 = []
    with open_ours(path, "xb") as file:
        for block in blocks:
            file.write(block)
            crc32.append(zlib.crc32(block))
    flush(path)
    return crc32


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A prepared dataset on disk, from ``Dataset.open``."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    vocab_size: int

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> "Dataset":
        """Open and check a dataset. ``verify=False`` skips the checks that read every byte."""
        path = Path(folder) / MANIFEST
        if not path.is_file():
            raise DataError(f"{path}: no such file, so there is no dataset; prepare the data first")
        try:
            manifest = json.loads(path.read_bytes())
            tokenizer = load_tokenizer(manifest["tokenizer"], path.parent)
            check_files(path.parent, manifest, tokenizer, verify)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise fault(path, getattr(error, "pos", 0), f"cannot be used: {error!r}") from error
        return cls(path.parent, manifest, tokenizer, tokenizer.vocab_size)

    @property
    def fingerprint(self) -> str:
        """A hash of the manifest, which has the checksums of all files."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    def tokens(self, split: str, order: Order = "random") -> "TokenStream":
        """``order`` is that of its batches."""
        check_choice("split", split, self.manifest["splits"])
        files = [self.folder / shard["file"] for shard in self.manifest["splits"][split]]
        dtype = token_dtype(self.vocab_size)
        return TokenStream(split, [np.memmap(file, dtype, "r") for file in files], order)


def check_files(folder: Path, manifest: dict[str, Any], tokenizer: Tokenizer, verify: bool) -> None:
    for key, value in token_format(tokenizer).items():
        if manifest[key] != value:
            raise fault(folder / MANIFEST, 0, f"{key} is {manifest[key]!r} instead of {value!r}")
    for split, shards in manifest["splits"].items():
        if not shards:
            raise fault(folder / MANIFEST, 0, f"split {split!r} is empty")
        for shard in shards:
            check_name(folder, shard["file"])
            check_shard(folder / shard["file"], shard, manifest["vocab_size"], verify)
    for name, crc32 in manifest["extra_files"].items():
        path = folder / check_name(folder, name)
        if not path.is_file() or (verify and [zlib.crc32(path.read_bytes())] != crc32):
            raise fault(path, 0, "missing, or with a wrong checksum")


def check_name(folder: Path, name: Any) -> str:
    """A manifest may name files of its own folder only."""
    is_name = isinstance(name, str) and Path(name).name == name and "\\" not in name
    if not is_name or name in ("", ".", "..") or len(name) > 100:
        raise fault(folder / MANIFEST, 0, f"{name!r} is not the name of a file in this folder")
    return name


def check_shard(path: Path, shard: Mapping[str, Any], vocab_size: int, verify: bool) -> None:
    dtype = token_dtype(vocab_size)
    size = shard["tokens"] * dtype.itemsize
    if not path.is_file():
        raise fault(path, 0, "this file is missing")
    if (found := path.stat().st_size) != size or size == 0:
        raise fault(path, min(found, size), f"the file has {found} bytes instead of {size}")
    if len(shard["crc32"]) != -(-size // CHECKSUM_BLOCK):
        raise fault(path, 0, "the manifest has the wrong number of checksums for this file")
    with path.open("rb") as file:
        for number, crc32 in enumerate(shard["crc32"] if verify else []):
            block, offset = file.read(CHECKSUM_BLOCK), number * CHECKSUM_BLOCK
            if zlib.crc32(block) != crc32:
                raise fault(path, offset, f"wrong checksum for the next {len(block)} bytes")
            tokens = np.frombuffer(block, dtype)
            if (wrong := first_outside(tokens, vocab_size)) is not None:
                problem = f"token {tokens[wrong]} is not in the vocabulary of {vocab_size}"
                raise fault(path, offset + wrong * dtype.itemsize, problem)


class TokenStream:
    """The tokens of one split, across its shards."""

    def __init__(self, split: str, shards: Sequence[np.ndarray], order: Order = "random"):
        self.order = order
        # Plain arrays of the same mapped memory: slicing an np.memmap is several times slower.
        self.shards = [shard.view(np.ndarray) for shard in shards]
        self.starts = list(itertools.accumulate(map(len, self.shards), initial=0))
        self.name = f"the {len(self)} tokens of split {split!r}"

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """``length`` tokens from position ``start``, as int64."""
        fits = 0 <= start < start + length <= len(self)
        check(fits, "(start, length)", (start, length), f"within {self.name}")
        parts = []
        while length > 0:
            shard = bisect.bisect_right(self.starts, start) - 1
            begin = start - self.starts[shard]
            parts.append(self.shards[shard][begin : begin + length])
            start, length = start + len(parts[-1]), length - len(parts[-1])
        return np.concatenate(parts, dtype=np.int64)

    def batch(
        self, *, seed: int, step: int, size: int, context: int, rank: int = 0, world: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and next-token targets, (size / world, context), for training iteration ``step``.

        The global batch depends only on (seed, step, size, context). Rank r gets its r-th part.
        """
        check(size > 0 and size % world == 0, "size", size, f"a multiple of world = {world}")
        check(0 <= rank < world, "rank", rank, f"at least 0 and below world = {world}")
        mine = self.starts_of(seed=seed, step=step, size=size, context=context)
        mine = mine[rank * size // world : (rank + 1) * size // world]
        windows = self.windows(mine, context + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def starts_of(self, *, seed: int, step: int, size: int, context: int) -> np.ndarray:
        """Where the texts of a global batch begin."""
        check(seed >= 0 and step >= 0, "(seed, step)", (seed, step), "at least 0")
        check(0 < context < len(self), "context", context, f"at least 1 and less than {self.name}")
        sizes = {"size": size, "context": context}
        return places(len(self), self.order, seed=seed, step=step, **sizes)

    def windows(self, starts: np.ndarray, length: int) -> torch.Tensor:
        """(windows, length), int64."""
        return torch.from_numpy(np.stack([self.read(int(start), length) for start in starts]))

    def resident(self, device: torch.device) -> "TokenStream":
        """The same stream with its tokens on a device, if they take at most a GiB there. A batch is
        then one gather, without a copy from the disk or the CPU."""
        return ResidentStream(self, device) if 4 * len(self) <= 2**30 else self


class ResidentStream(TokenStream):
    """A stream with its tokens on a device, where it makes its batches."""

    def __init__(self, stream: TokenStream, device: torch.device):
        self.shards, self.starts, self.name = stream.shards, stream.starts, stream.name
        self.order = stream.order
        whole = np.concatenate([shard.astype(np.int32) for shard in stream.shards])
        self.tokens = torch.from_numpy(whole).to(device)

    def windows(self, starts: np.ndarray, length: int) -> torch.Tensor:
        device = self.tokens.device
        first = to_device(torch.from_numpy(starts), device)
        return self.tokens[first[:, None] + torch.arange(length, device=device)].long()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy without waiting for the device: to a GPU, from pinned memory."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
