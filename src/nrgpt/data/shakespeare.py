"""Shakespeare as characters, as in nanoGPT: the first 90 % to train on, the rest for validation."""

import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

import numpy as np

from .shards import DataError, write_dataset
from .tokenizer import SymbolTokenizer

SHAKESPEARE = "NRGPT_SHAKESPEARE"
"""Environment variable: path of a local copy, for machines offline."""

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_SECONDS = 5


def prepare_shakespeare(folder: Path, *, source: Path | None = None) -> None:
    """Write Shakespeare as characters into the dataset ``folder``.

    The text is ``source``, which may be any text file; otherwise the file that NRGPT_SHAKESPEARE
    names, or a download, and these must be the usual file.
    """
    content = find_shakespeare() if source is None else source.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: byte {error.start}: this is not UTF-8") from error
    tokenizer = SymbolTokenizer(sorted(set(text)))
    tokens = np.array(tokenizer.encode(text), np.int64)
    train = int(len(text) * 0.9)
    splits = {"train": [tokens[:train]], "val": [tokens[train:]]}
    sha256 = hashlib.sha256(content).hexdigest()
    write_dataset(folder, tokenizer, splits, source={"kind": "shakespeare", "sha256": sha256})


def find_shakespeare() -> bytes:
    if (path := os.environ.get(SHAKESPEARE)) is not None:
        origin = f"{SHAKESPEARE} = {path}"
        if not Path(path).is_file():
            raise FileNotFoundError(f"{origin}: there is no such file")
        content = Path(path).read_bytes()
    else:
        origin = URL
        try:
            with urllib.request.urlopen(URL, timeout=DOWNLOAD_SECONDS) as answer:
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise FileNotFoundError(
                f"Shakespeare could not be downloaded ({error}); put the file {URL} on this "
                f"machine and set {SHAKESPEARE} to its path"
            ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise DataError(
            f"{origin}: its sha256 is {found} instead of {SHA256}; to train on another text: nrgpt "
            "train --text FILE"
        )
    return content
