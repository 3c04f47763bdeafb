"""Text of every kind becomes the same shards, whoever does the work and however often it dies."""

import json
import lzma
import os
import signal
import subprocess
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from nrgpt.data import documents as reading
from nrgpt.data import text
from nrgpt.data.shards import DataError, Dataset, working_folder
from nrgpt.data.text import prepare_hub, prepare_text
from nrgpt.data.tokenizer import GPT2Tokenizer, SymbolTokenizer

from ..data.test_tokenizer import use_small_ranks
from ..processes import environment, output_of, started, wait_for

LETTERS = SymbolTokenizer(list("abcdefghij \n"))
END = "<|endoftext|>"


def documents(number=300):
    random = np.random.default_rng(0)
    lengths = random.integers(1, 60, number)
    return ["a" + "".join(random.choice(LETTERS.symbols, n)) + "j" for n in lengths]


def write_text(path, texts):
    path.write_text("".join(f"{document}\n{END}\n" for document in texts))
    return path


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: t}) + "\n" for t in texts))
    return path


def write_parquet(path, texts, field="text"):
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=100)
    return path


def prepare(source, folder, **options):
    options = {"tokenizer": LETTERS, "validation": 0.2, "progress": False, **options}
    prepare_text(source if isinstance(source, list) else [source], folder, **options)
    return content(folder)


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards_only(files):
    return {name: data for name, data in files.items() if name.endswith(".bin")}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(reading, "PIECE_CHARACTERS", 500)


def test_every_document_is_in_one_split_in_order_and_ends_with_the_end_of_text(
    monkeypatch, tmp_path, small_pieces
):
    use_small_ranks(monkeypatch, tmp_path)
    texts = [f"hello {i}" for i in range(400)]
    tokenizer = GPT2Tokenizer()
    prepare(write_text(tmp_path / "a.txt", texts), tmp_path / "a", tokenizer=tokenizer)
    dataset = Dataset.open(tmp_path / "a")
    found = {}
    for split in ("train", "val"):
        stream = dataset.tokens(split)
        tokens = stream.read(0, len(stream)).tolist()
        assert tokens[-1] == tokenizer.end_of_text
        found[split] = tokenizer.decode(tokens).split(END)[:-1]
        assert found[split] == sorted(found[split], key=lambda t: int(t.split()[1]))
    assert sorted(found["train"] + found["val"]) == sorted(texts)
    assert 50 < len(found["val"]) < 110
    assert dataset.manifest["source"]["documents"] == 400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.txt", "small.tiktoken"]


def test_every_kind_of_file_gives_the_same_shards(tmp_path, small_pieces):
    texts = documents()
    plain = write_text(tmp_path / "a.txt", texts)
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(plain.read_bytes()))
    (tmp_path / "crlf.txt").write_bytes(
        "".join(f"{document}\n{END}\r\n" for document in texts).encode()
    )
    write_jsonl(tmp_path / "c.jsonl", texts)
    write_parquet(tmp_path / "d.parquet", texts)
    write_text(tmp_path / "e1.txt", texts[:120])
    write_parquet(tmp_path / "e2.parquet", texts[120:])
    expected = shards_only(prepare(plain, tmp_path / "a"))
    dataset = Dataset.open(tmp_path / "a")
    number = sum(len(dataset.tokens(split)) for split in ("train", "val"))
    assert number == sum(map(len, texts))  # no end of text where the vocabulary has none
    for name in ("b.txt.xz", "crlf.txt", "c.jsonl", "d.parquet"):
        assert shards_only(prepare(tmp_path / name, tmp_path / f"out-{name}")) == expected
    two = [tmp_path / "e1.txt", tmp_path / "e2.parquet"]
    assert shards_only(prepare(two, tmp_path / "e")) == expected


def test_the_seed_decides_the_split_and_no_validation_means_no_such_split(tmp_path):
    source = write_text(tmp_path / "a.txt", documents())
    first = prepare(source, tmp_path / "a", seed=1)
    assert prepare(source, tmp_path / "b", seed=1) == first
    assert prepare(source, tmp_path / "c", seed=2)["val-00000.bin"] != first["val-00000.bin"]
    assert list(shards_only(prepare(source, tmp_path / "d", validation=0))) == ["train-00000.bin"]


def test_other_settings_do_not_use_what_an_interrupted_run_left(tmp_path, small_pieces):
    source = write_text(tmp_path / "a.txt", documents())
    (tmp_path / "broken.jsonl").write_text("{")
    expected = prepare(source, tmp_path / "expected")
    for options in ({"seed": 1}, {"validation": 0.5}):
        with pytest.raises(DataError, match="broken"):
            prepare([source, tmp_path / "broken.jsonl"], tmp_path / "a", **options)
        assert len(list((tmp_path / "a.partial").glob("0*"))) > 10
    assert prepare(source, tmp_path / "a") == expected


def test_blank_documents_are_left_out_and_the_last_separator_may_be(tmp_path):
    (tmp_path / "a.txt").write_text(f"ab\n\n{END}\n{END}\n \n{END}\ncd\n")
    prepare(tmp_path / "a.txt", tmp_path / "a", validation=0)
    dataset = Dataset.open(tmp_path / "a")
    assert dataset.manifest["source"]["documents"] == 2
    tokens = dataset.tokens("train")
    assert dataset.tokenizer.decode(tokens.read(0, len(tokens))) == "ab\ncd\n"


@pytest.mark.parametrize("ending", ["", "\n", f"\n{END}\n", "\n \n\n"])
def test_a_document_that_is_read_in_parts_has_the_tokens_of_the_whole(
    monkeypatch, tmp_path, ending
):
    use_small_ranks(monkeypatch, tmp_path)
    monkeypatch.setattr(reading, "PIECE_CHARACTERS", 40)
    lines = ["hello\n", "\n", "  he said\u00a0\n", "hell \r\n", "é" * 30 + "\n", "\n\n", "x"]
    whole = "".join(lines * 20)
    (tmp_path / "a.txt").write_bytes((whole + ending).encode())
    prepare(tmp_path / "a.txt", tmp_path / "a", tokenizer=GPT2Tokenizer(), validation=0)
    dataset = Dataset.open(tmp_path / "a")
    tokens = dataset.tokens("train")
    expected = GPT2Tokenizer().encode(whole + ending.removesuffix(f"\n{END}\n"))
    assert tokens.read(0, len(tokens)).tolist() == [*expected, GPT2Tokenizer.end_of_text]
    assert dataset.manifest["source"]["documents"] == 1


def test_documents_in_parts_are_numbered_like_whole_ones(monkeypatch, tmp_path):
    use_small_ranks(monkeypatch, tmp_path)
    monkeypatch.setattr(reading, "PIECE_CHARACTERS", 40)
    options = {"tokenizer": GPT2Tokenizer(), "validation": 0.3}
    in_parts = write_text(tmp_path / "a.txt", documents())
    whole = write_jsonl(tmp_path / "a.jsonl", documents())
    expected = shards_only(prepare(whole, tmp_path / "whole", **options))
    assert shards_only(prepare(in_parts, tmp_path / "in_parts", **options)) == expected
    place = in_parts.stat().st_size
    in_parts.write_bytes(in_parts.read_bytes() + b"ab" * 30 + b"\n" + b"cd" * 30 + b"\n\xff")
    with pytest.raises(DataError, match=rf"a\.txt: byte {place + 122}: this is not UTF-8"):
        prepare(in_parts, tmp_path / "a", **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_sources_are_streamed_and_workers_do_not_change_a_byte(tmp_path, small_pieces, workers):
    expected = prepare(write_text(tmp_path / "a.txt", ["a" * 100] * 200), tmp_path / "expected")

    def watched():
        for number in range(200):
            finished = len(list((tmp_path / "a.partial").glob("0*")))
            assert number // 5 <= finished + 1 + 3 * (workers - 1) * workers
            yield text.Document("a" * 100, "here", number)

    options = {"tokenizer": LETTERS, "validation": 0.2, "progress": False, "workers": workers}
    text.prepare_documents(text.Source(watched), tmp_path / "a", {}, None, **options)
    assert shards_only(content(tmp_path / "a")) == shards_only(expected)


KILLED = """
import sys, time
from pathlib import Path
from nrgpt.data import documents, text
from tests.data.test_text import prepare

documents.PIECE_CHARACTERS = 500
tokenise = text.PieceMaker.tokenise

def slowly(*arguments):
    time.sleep(0.1)
    return tokenise(*arguments)

text.PieceMaker.tokenise = slowly
if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Path(sys.argv[2]), workers=int(sys.argv[3]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_continued_gives_the_same_bytes(monkeypatch, tmp_path, small_pieces, workers):
    source = write_text(tmp_path / "a.txt", documents())
    expected = prepare(source, tmp_path / "expected")
    (tmp_path / "killed.py").write_text(KILLED)
    killed = [sys.executable, tmp_path / "killed.py", source, tmp_path / "a", str(workers)]

    def made():
        found = sorted((tmp_path / "a.partial").glob("0*[!.tmp]"))
        return found if len(found) >= 4 else None

    with started(killed, env=environment(), stderr=subprocess.PIPE) as process:
        finished = wait_for(made, process, "a finished piece")
        os.kill(process.pid, signal.SIGKILL)
        output_of(process)  # returns when no worker holds the pipe: none lives on
    assert not (tmp_path / "a").exists()
    finished[0].write_bytes(finished[0].read_bytes()[:-1])  # as after a power cut

    tokenised = []
    tokenise = text.PieceMaker.tokenise

    def noted(maker, piece):
        tokenised.append(piece.number)
        return tokenise(maker, piece)

    monkeypatch.setattr(text.PieceMaker, "tokenise", noted)
    assert prepare(source, tmp_path / "a") == expected
    assert tokenised[0] == 0
    assert not {int(path.name[:8]) for path in finished[1:]} & set(tokenised)
    assert not (tmp_path / "a.partial").exists()


BAD_FILES = {
    "no.csv": (b"a", ValueError, r"no\.csv: must be a \.txt, \.txt\.xz, \.jsonl or \.par"),
    "empty.txt": (b"", DataError, r"empty\.txt: there is no document in this file"),
    "blank.txt": (b"\n \n", DataError, r"blank\.txt: there is no document"),
    "bytes.txt": (b"ab\n<|endoftext|>\nab\xff", DataError, r"bytes\.txt: byte 19: .*not UTF-8"),
    "alien.txt": (b"ab\n<|endoftext|>\nabX", DataError, r"alien\.txt: byte 17: 'X' at position 2"),
    "cut.txt.xz": (lzma.compress(b"ab\n" * 999)[:-9], DataError, r"cut\.txt\.xz: byte \d+ of the"),
    "no.txt.xz": (b"plain text", DataError, r"no\.txt\.xz: byte 0 of the unpacked text"),
    "json.jsonl": (b'{"text": "a"}\n\n{"text"\n', DataError, r"json\.jsonl: line 3 \(from byte 15"),
    "utf8.jsonl": (b'{"text": "\xff"}\n', DataError, r"utf8\.jsonl: line 1 .*utf-8"),
    "field.jsonl": (b'{"text": "a"}\n{"body": "a"}', DataError, r"line 2: .*'text' \(found: body"),
    "list.jsonl": (b"[1]", DataError, r"list\.jsonl: line 1: .*found: list"),
    "null.jsonl": (b'{"text": null}', DataError, r"null\.jsonl: line 1: there is no text"),
    "bytes.parquet": (b"PAR1 and no more", DataError, r"bytes\.parquet: row 0: "),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_with_the_place_of_the_fault(tmp_path, name):
    data, kind, said = BAD_FILES[name]
    (tmp_path / name).write_bytes(data)
    good = write_text(tmp_path / "good.txt", documents())
    with pytest.raises(kind, match=said):
        prepare([good, tmp_path / name], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_row_or_column_of_parquet_without_text_is_named(tmp_path):
    source = write_parquet(tmp_path / "a.parquet", ["a", None])
    with pytest.raises(DataError, match=r"a\.parquet: row 1: there is no text in the field 'text'"):
        prepare(source, tmp_path / "a")
    with pytest.raises(DataError, match=r"a\.parquet: row 0: .*'body' \(found: id, text\)"):
        prepare(source, tmp_path / "a", field="body")


def test_wrong_arguments_are_refused_before_any_work(tmp_path):
    source = write_text(tmp_path / "a.txt", documents())
    for options, said in [
        ({"validation": 1.0}, r"validation = 1\.0: must be in \[0, 1\)"),
        ({"workers": 0}, "workers = 0: must be at least 1"),
        ({"shard_tokens": 0}, "shard_tokens = 0: must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            prepare(source, tmp_path / "a", **options)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        prepare(tmp_path / "nowhere.txt", tmp_path / "a")
    with pytest.raises(ValueError, match="at least one file"):
        prepare([], tmp_path / "a")
    with pytest.raises(FileExistsError, match="exists already"):
        prepare(source, tmp_path)
    with pytest.raises(ValueError, match=r"validation = 1e-12: .* 300 documents .*split 'val'"):
        prepare(source, tmp_path / "a", validation=1e-12)
    with working_folder(tmp_path / "a.partial"), pytest.raises(BlockingIOError, match="another"):
        prepare(source, tmp_path / "a")


def test_the_hub_is_streamed_through_the_same_code(monkeypatch, tmp_path):
    texts = documents()

    class Stream(list):
        info = types.SimpleNamespace(splits={"train": types.SimpleNamespace(num_examples=300)})

    def load_dataset(name, *, split, streaming):
        assert (name, split, streaming) == (text.OPENWEBTEXT, "train", True)
        return Stream({"text": document} for document in texts)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    options = {"tokenizer": LETTERS, "validation": 0.2, "progress": False}
    prepare_hub(text.OPENWEBTEXT, tmp_path / "hub", **options)
    expected = prepare(write_text(tmp_path / "a.txt", texts), tmp_path / "a")
    assert shards_only(content(tmp_path / "hub")) == shards_only(expected)


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs datasets.*pip install 'nrgpt\[data\]'"):
        prepare_hub(text.OPENWEBTEXT, tmp_path / "a", tokenizer=LETTERS)
    source = write_parquet(tmp_path / "a.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"needs pyarrow.*pip install 'nrgpt\[data\]'"):
        prepare(source, tmp_path / "a")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_piece_that_vanishes_is_named(tmp_path, monkeypatch, small_pieces, workers):
    source = write_text(tmp_path / "a.txt", documents())
    write_dataset = text.write_dataset

    def later(*arguments, **options):
        next((tmp_path / "a.partial").glob("0*")).unlink()
        return write_dataset(*arguments, **options)

    monkeypatch.setattr(text, "write_dataset", later)
    with pytest.raises(DataError, match=r"a\.partial.* has vanished .* run the same command again"):
        prepare(source, tmp_path / "a", workers=workers)
    monkeypatch.undo()
    prepare(source, tmp_path / "a")
