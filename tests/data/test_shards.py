"""A dataset is complete or not there, faults are found and named, batches are a pure function."""

import json
import subprocess
import sys
import time  # noqa: F401 (for the code of processes)
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from nrgpt.data import shards
from nrgpt.data.shards import DataError, Dataset, TokenStream, working_folder, write_dataset
from nrgpt.data.tokenizer import SymbolTokenizer
from tests.processes import output_of, started, wait_for

LETTERS = SymbolTokenizer(list("abcdefghij"))
BLOCK_TOKENS = shards.CHECKSUM_BLOCK // 2


def random_tokens(number):
    return np.random.default_rng(0).integers(0, LETTERS.vocab_size, number)


def write(folder, train=None, **options):
    train = random_tokens(1000) if train is None else train
    splits = {"train": [train], "val": [train[:50]]}
    write_dataset(folder, LETTERS, splits, source={"kind": "test"}, **options)
    return train


def test_what_is_written_is_read_across_the_borders_of_shards(tmp_path):
    expected = random_tokens(1000)
    pieces = np.split(expected, [0, 1, 3, 400, 999])  # empty, tiny and longer than a shard
    splits, extra = {"train": pieces, "val": [expected[:70]]}, {"notes.txt": b"hello"}
    write_dataset(tmp_path / "a", LETTERS, splits, source={}, extra_files=extra, shard_tokens=70)
    dataset = Dataset.open(tmp_path / "a")
    names = [f"train-{i:05d}.bin" for i in range(15)]
    here = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert here == ["manifest.json", "notes.txt", *names, "val-00000.bin"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert dataset.vocab_size == dataset.tokenizer.vocab_size == 10
    with pytest.raises(ValueError, match="split = 'test': must be one of 'train', 'val'"):
        dataset.tokens("test")
    stream = dataset.tokens("train")
    assert stream.read(5, 400).dtype == np.int64
    for start, length in [(0, len(stream)), (69, 1), (69, 2), (70, 70), (5, 400), (999, 1)]:
        assert np.array_equal(stream.read(start, length), expected[start : start + length])


def test_more_than_one_checksum_block_in_a_shard(tmp_path):
    train = random_tokens(2 * BLOCK_TOKENS + 50)
    write(tmp_path / "a", train, shard_tokens=BLOCK_TOKENS + 5)
    dataset = Dataset.open(tmp_path / "a")
    sizes = [(s["tokens"], len(s["crc32"])) for s in dataset.manifest["splits"]["train"]]
    assert sizes == [(BLOCK_TOKENS + 5, 2), (BLOCK_TOKENS + 5, 2), (40, 1)]
    assert np.array_equal(dataset.tokens("train").read(0, len(train)), train)


def test_the_dtype_follows_the_vocabulary(tmp_path):
    assert shards.token_dtype(65_536) == np.dtype("<u2")
    large = SymbolTokenizer([chr(0x10000 + i) for i in range(65_537)])
    tokens = np.array([0, 65_536, 65_535])
    write_dataset(tmp_path / "a", large, {"train": [tokens]}, source={})
    dataset = Dataset.open(tmp_path / "a")
    assert dataset.manifest["dtype"] == "uint32"
    assert (tmp_path / "a" / "train-00000.bin").read_bytes() == tokens.astype("<u4").tobytes()
    assert dataset.tokens("train").read(0, 3).tolist() == tokens.tolist()


def failing_source():
    yield random_tokens(10)
    raise RuntimeError("the source broke")


@pytest.mark.parametrize(
    ("splits", "options", "said"),
    [
        ({"train": [np.array([1, 2]), np.array([3, 10])]}, {}, "'train': position 3: token 10"),
        ({"train": [np.array([0, -1])]}, {}, "position 1: token -1 is not in the vocabulary of 10"),
        ({"train": [np.array([0.0])]}, {}, "must be integers, not float64"),
        ({"train": [np.array([0])], "val": []}, {}, "split 'val' has no tokens"),
        ({"train": [np.array([0])]}, {"shard_tokens": 0}, "shard_tokens = 0: must be positive"),
        ({"train": failing_source()}, {}, "the source broke"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, splits, options, said):
    with pytest.raises((ValueError, RuntimeError), match=said):
        write_dataset(tmp_path / "a", LETTERS, splits, source={}, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_dataset_is_never_overwritten(tmp_path):
    train = write(tmp_path / "a")
    with pytest.raises(FileExistsError, match="a exists already; delete it first"):
        write(tmp_path / "a", train[::-1])
    assert np.array_equal(Dataset.open(tmp_path / "a").tokens("train").read(0, 1000), train)
    (tmp_path / "home").mkdir()  # which nobody is advised to delete
    with pytest.raises(FileExistsError, match="home exists already and is no dataset; choose"):
        write(tmp_path / "home")


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    said = pytest.raises(BlockingIOError, match="another process is preparing this data")
    with working_folder(tmp_path / "a.writing"), said:
        write(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def start(code, folder):
    command = [sys.executable, "-c", f"from tests.data.test_shards import *\n{code}", str(folder)]
    root = Path(__file__).parents[2]
    return started(command, cwd=root, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_leaves_nothing_behind_and_says_where(tmp_path):
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
write(Path(sys.argv[1]), random_tokens(100_000))
"""
    with start(code, tmp_path / "a") as process:
        _, errors = output_of(process)
    assert process.returncode == 1
    assert "OSError: [Errno 27] File too large: " in errors
    assert str(tmp_path / "a.writing") in errors
    assert list(tmp_path.iterdir()) == []


def test_killed_while_writing_and_written_again(tmp_path):
    code = """
def slowly():
    while True:
        time.sleep(0.01)
        yield random_tokens(2**20)
write_dataset(Path(sys.argv[1]), LETTERS, {"train": slowly()}, source={})
"""
    with start(code, tmp_path / "a") as process:
        wait_for((tmp_path / "a.writing" / "train-00000.bin").exists, process, "a shard")
    assert not (tmp_path / "a").exists()
    with pytest.raises(DataError, match="no such file"):
        Dataset.open(tmp_path / "a.writing")
    train = write(tmp_path / "a")
    assert np.array_equal(Dataset.open(tmp_path / "a").tokens("train").read(0, 1000), train)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def edit_file(name, edit):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        (folder / name).write_bytes(edit(content) or content)

    return damage


def edit_manifest(edit):
    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        edit(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def flip_in_second_block(content):
    content[shards.CHECKSUM_BLOCK + 7] ^= 1


def forge_token(folder):
    """A token beyond the vocabulary under a right checksum: a faulty writer, not a faulty disk."""
    path = folder / "val-00000.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[3] = 10
    tokens.tofile(path)
    crc32 = [zlib.crc32(path.read_bytes())]
    edit_manifest(lambda manifest: manifest["splits"]["val"][0].update(crc32=crc32))(folder)


FAULTS = {
    "truncated": (edit_file("val-00000.bin", lambda c: c[:-1]), r"val-00000\.bin: byte 99: .* 99"),
    "too long": (edit_file("val-00000.bin", lambda c: c + b"ab"), r"val-00000\.bin: byte 100: "),
    "empty": (lambda f: (f / "val-00000.bin").write_bytes(b""), r"val-00000\.bin: byte 0: .* 0 by"),
    "missing": (lambda f: (f / "val-00000.bin").unlink(), r"val-00000\.bin: byte 0: .*missing"),
    "bit flip": (
        edit_file("train-00000.bin", flip_in_second_block),
        r"train-00000\.bin: byte 1048576: wrong checksum",
    ),
    "token": (forge_token, r"val-00000\.bin: byte 6: token 10 is not in the vocabulary of 10"),
    "extra file": (edit_file("notes.txt", lambda c: c[::-1]), r"notes\.txt: byte 0: "),
    "manifest cut": (edit_file("manifest.json", lambda c: c[:60]), r"manifest\.json: byte \d\d: "),
    "manifest bytes": (edit_file("manifest.json", lambda c: b"{\xff}"), r"manifest\.json: .*utf-8"),
    "manifest list": (edit_file("manifest.json", lambda c: b"[1]"), r"manifest\.json: byte 0: "),
    "format": (edit_manifest(lambda m: m.update(format=2)), "format is 2 instead of 1"),
    "dtype": (edit_manifest(lambda m: m.update(dtype="uint32")), "dtype is 'uint32' instead of"),
    "vocabulary": (edit_manifest(lambda m: m.update(vocab_size=11)), "vocab_size is 11 instead"),
    "symbols": (edit_manifest(lambda m: m["tokenizer"]["symbols"].reverse()), "tokenizer_sha256"),
    "tokenizer": (edit_manifest(lambda m: m["tokenizer"].update(kind="x")), "unknown tokenizer"),
    "no splits": (edit_manifest(lambda m: m.pop("splits")), r"manifest\.json: .*splits"),
    "no shards": (edit_manifest(lambda m: m["splits"]["val"].clear()), "split 'val' is empty"),
    "no count": (edit_manifest(lambda m: m["splits"]["val"][0].pop("tokens")), "KeyError.*tokens"),
    "no checksums": (
        edit_manifest(lambda m: m["splits"]["val"][0]["crc32"].clear()),
        r"val-00000\.bin: .*number of checksums",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_and_names_file_offset_and_way_out(tmp_path, name):
    damage, said = FAULTS[name]
    folder = tmp_path / "a"
    write(folder, random_tokens(BLOCK_TOKENS + 100), extra_files={"notes.txt": b"hello"})
    Dataset.open(folder)
    damage(folder)
    with pytest.raises(DataError, match=said) as caught:
        Dataset.open(folder)
    assert str(folder) in str(caught.value)
    assert "prepare the data again" in str(caught.value)


def test_a_quick_opening_still_finds_wrong_sizes(tmp_path):
    write(tmp_path / "a")
    path = tmp_path / "a" / "val-00000.bin"
    path.write_bytes(path.read_bytes()[::-1])
    Dataset.open(tmp_path / "a", verify=False)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"val-00000\.bin: byte 98"):
        Dataset.open(tmp_path / "a", verify=False)


def counting_stream(*lengths):
    """Tokens that say where they stand."""
    return TokenStream("train", np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))


def test_targets_are_the_next_tokens_even_at_the_borders_of_shards():
    inputs, targets = counting_stream(30, 50, 20).batch(seed=1, step=2, size=40, context=45)
    assert inputs.shape == targets.shape == (40, 45)
    assert inputs.dtype == targets.dtype == torch.int64
    assert all(tensor.is_contiguous() for tensor in (inputs, targets))
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(45))
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("world", [2, 3, 12])
def test_any_world_sees_the_same_global_batch(world):
    stream = counting_stream(500, 500)
    whole = stream.batch(seed=5, step=9, size=12, context=7)
    options = {"seed": 5, "step": 9, "size": 12, "context": 7, "world": world}
    ranks = [stream.batch(rank=rank, **options) for rank in range(world)]
    for i in range(2):
        assert torch.equal(whole[i], torch.cat([rank[i] for rank in ranks]))


def test_batches_depend_on_seed_and_step_and_never_change():
    stream = counting_stream(1_000_000)

    def starts(seed, step):
        return stream.batch(seed=seed, step=step, size=4, context=8)[0][:, 0].tolist()

    # Philox4x64-10 with key (1337, 7) and counter 1, computed by hand.
    assert starts(1337, 7) == [646_562, 252_746, 102_954, 325_843]
    drawn = [tuple(starts(seed, step)) for seed in (0, 1, 7) for step in (0, 1, 7)]
    assert len(set(drawn)) == 9


def test_every_place_of_the_split_is_drawn_equally_often():
    stream = counting_stream(8, 5)
    inputs, targets = stream.batch(seed=0, step=0, size=8000, context=3)
    counts = torch.bincount(inputs[:, 0], minlength=10)
    assert (len(counts), targets.max()) == (10, 12)
    assert (counts - 800).abs().max() < 5 * 800**0.5


def test_a_pass_meets_every_token_once():
    """Whatever the size of a batch; the next pass has another order, and other texts."""
    stream = TokenStream("train", [np.arange(1_003)], "passes")
    drawn = [stream.batch(seed=3, step=i, size=7, context=10)[0] for i in range(40)]
    texts = torch.cat(drawn)
    passes = texts[:100], texts[100:200]
    for one in passes:
        seen = one.flatten().sort().values
        assert torch.equal(seen, seen[0] + torch.arange(1_000))
    assert not torch.equal(passes[0], passes[1])
    assert passes[0][:, 0].tolist() != sorted(passes[0][:, 0].tolist())
    other = stream.batch(seed=4, step=0, size=7, context=10)[0]
    assert not torch.equal(other, drawn[0])
    shortest = TokenStream("train", [np.arange(11)], "passes")
    assert shortest.batch(seed=0, step=5, size=2, context=10)[1].max() == 10


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"size": 10, "world": 4}, "size = 10: must be a multiple of world = 4"),
        ({"size": 0}, "size = 0"),
        ({"rank": 2, "world": 2}, "rank = 2: must be at least 0 and below world = 2"),
        ({"context": 100}, "context = 100: must be .* less than the 100 tokens of split 'train'"),
        ({"context": 0}, "context = 0"),
        ({"seed": -1}, r"\(seed, step\) = \(-1, 0\): must be at least 0"),
    ],
)
def test_impossible_batches_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        counting_stream(100).batch(**{"seed": 0, "step": 0, "size": 8, "context": 9, **fields})
    assert counting_stream(100).batch(seed=0, step=0, size=8, context=99)[1].max() == 99


@pytest.mark.parametrize(("start", "length"), [(-1, 5), (0, 101), (100, 1), (5, 0)])
def test_reading_outside_the_split_is_refused(start, length):
    with pytest.raises(ValueError, match="must be within the 100 tokens of split 'train'"):
        counting_stream(100).read(start, length)


@pytest.mark.parametrize("world", [1, 3])
def test_a_resident_stream_makes_the_same_batches(tmp_path, world):
    tokens = np.random.default_rng(0).integers(0, 70_000, 1_000)
    symbols = SymbolTokenizer([chr(0x10000 + i) for i in range(70_000)])
    write_dataset(tmp_path / "a", symbols, {"train": [tokens]}, source={}, shard_tokens=300)
    stream = Dataset.open(tmp_path / "a").tokens("train")
    resident = stream.resident(torch.device("cpu"))
    assert resident is not stream
    for step in range(3):
        options = {"seed": 5, "step": step, "size": 6, "context": 17, "world": world}
        for rank in range(world):
            ours, theirs = (each.batch(rank=rank, **options) for each in (resident, stream))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("place", ["a.writing", ".a.writing.lock", "a"])
@pytest.mark.parametrize("target", ["file", "folder"])
def test_links_are_not_followed(tmp_path, place, target):
    victims = tmp_path / "victims"
    (victims / "folder").mkdir(parents=True)
    for name in ("file", "folder/file"):
        (victims / name).write_text("mine")
    (tmp_path / place).symlink_to(victims / target)
    with pytest.raises((ValueError, OSError), match=r"link|exists already"):
        write(tmp_path / "a")
    assert (victims / "file").read_text() == (victims / "folder" / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "", 3, None, "a\\b"])
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name):
    write(tmp_path / "a", extra_files={"notes.txt": b"hello"})
    edit_manifest(lambda manifest: manifest["splits"]["val"][0].update(file=name))(tmp_path / "a")
    with pytest.raises(DataError, match="is not the name of a file in this folder") as said:
        Dataset.open(tmp_path / "a")
    assert "delete" not in str(said.value)


@pytest.mark.parametrize("source", [[], "x", 3, None, {"listops": []}, {"kind": []}])
def test_a_manifest_with_an_odd_source(tmp_path, source):
    from nrgpt.train.config import DataConfig
    from nrgpt.train.data import open_dataset

    write(tmp_path / "a")
    edit_manifest(lambda manifest: manifest.update(source=source))(tmp_path / "a")
    with pytest.raises(ValueError, match=r"data\.folder: "):
        open_dataset(DataConfig(task="listops", folder=str(tmp_path / "a")), 10)


def test_a_manifest_of_a_million_brackets(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").write_text("[" * 1_000_000)
    with pytest.raises(DataError, match=r"manifest\.json: .*cannot be used"):
        Dataset.open(tmp_path / "a")
