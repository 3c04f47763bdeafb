"""Mistakes on the command line: each is one clear line and exit code 2, and nothing has changed."""

import json
import os
import socket
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nrgpt.cli import app

ZOO = "zoo:shakespeare_certified"
TRAIN = ("train", "debug", "iterations=2", "optimiser.warmup=1")
SWEEP = ("sweep", "debug", "iterations=2", "optimiser.warmup=1", "--to", "s")
SEARCH = (*SWEEP, "optimiser.lr=log(1e-4,1e-2)", "--trials")
EVALUATE = ("evaluate", ZOO, "--no-loss", "--tasks")
PAIR = {"sentence_good": "A", "sentence_bad": "B", "field": "f", "UID": "u"}
CHOICES = {"query": "q", "choices": ["a", "b"], "gold": 0}


def there():
    """Everything in the present folder, with its contents."""
    found = {}
    for path in Path().rglob("*"):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "other"
        found[str(path)] = path.read_bytes() if path.is_file() else kind
    return found


def refused(*words):
    """What the command says, if it is refused as it should be."""
    before = there()
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert there() == before
    said = result.output.strip()
    lines = [line for line in said.splitlines() if line.startswith("nrgpt: ")]
    assert len(lines) == 1 or "╭─ Error" in said, said
    return " ".join(line.strip("│╭╮╰╯─ ") for line in said.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*TRAIN, "data.folder=\0"), "data.folder = '\\x00': must be a folder's path"),
        ((*TRAIN, "--to", "a\udcff"), "'a\\udcff' cannot be the name of a run"),
        ((*TRAIN, "--to", "a\nb"), "'a\\nb' cannot be the name of a run"),
        ((*TRAIN, "init_from="), ". is not a run"),
        ((*TRAIN, "init_from=zoo:../x"), "the zoo has no model '../x'"),
        ((*TRAIN, "data.order=x"), "order = 'x': must be one of"),
        ((*TRAIN, "objective=masked"), "add model.vocab_size=18"),
        ((*TRAIN, "masked_share=0.5"), "masked_share = 0.5: must be left alone"),
        ((*TRAIN, "sharded=true"), "sharded = True: must be False with parallel = 'ddp'"),
        ((*TRAIN, "model.block=et"), "objective = 'next': must be 'masked'"),
        ((*TRAIN, "model.steps=2000000000"), "this training takes at least"),
        ((*SWEEP, "seed=,"), "'seed=,': there is no value between the commas"),
        ((*SWEEP, "seed=0,1", "--packed", "0"), "--packed"),
        ((*SWEEP, "seed=0,1", "--packed", "-3"), "--packed"),
        ((*SEARCH, "0"), "--trials"),
        ((*SEARCH, "1", "--storage", "nope://x"), "nope://x cannot be used as a record"),
        (("train", "debug", "--packed", "seeds=10000000000"), "below 10,000"),
        (("train", "--text", "t.txt", "--packed"), "--packed: not with --text"),
        (("train", "--text", "t.txt", "--tokenizer", "bpe", "--vocabulary", 10**12), "at most"),
        (("train", "--text", "short.txt"), "2 tokens of text are too few"),
        (("serve", ZOO, "--port", 99_999), "--port"),
        (("serve", ZOO, "--key", " "), "an empty key keeps nobody out"),
        (("serve", ZOO, "--host", "no such host", "--key", "x"), "--host no such host --port"),
        (("explore", ZOO, "--no-browser", "--port", 99_999), "--port"),
        (("explore", ZOO, "--to", "mine.html"), "mine.html exists and is no page of nrgpt"),
        (("trajectory", ZOO, "--to", "."), "index.html exists and is no page of nrgpt"),
        (("landscape", ZOO, "--to", "."), "index.html exists and is no page of nrgpt"),
        (("trajectory", ZOO, "--to", "t", "--steps", 0), "steps = 0: must be a whole number"),
        (("trajectory", ZOO, "--to", "t", "--steps", 10**9), "at most 1,000,000"),
        (("trajectory", ZOO, "--to", "t", "--text", ""), "idx has 0 tokens"),
        (("landscape", ZOO, "--to", "t/u", "--starts", -1), "starts = -1"),
        (("landscape", ZOO, "--to", "t", "--text", ""), "--text '': there is no token in it"),
        (("landscape", ZOO, "--to", "t", "--seed", 2**64), "--seed"),
        (("sample", ZOO, "--seed", -1), "--seed"),
        (("sample", ZOO, "--seed", 2**70), "--seed"),
        (("sample", ZOO, "--steps", 2**40), "at most 1,000,000"),
        (("chat", ZOO, "--top-p", 0), "top_p = 0.0: must be in (0, 1]"),
        (("chat", ZOO, "--temperature", "nan"), "temperature = nan"),
        (("chat", ZOO, "--tokens", -5), "--tokens = -5: must be at least 1"),
        (("chat", ZOO, "--steps", 0), "steps = 0"),
        (("certificate", ZOO, "--texts", 0), "--texts"),
        (("adaptive", ZOO, "--texts", -1), "--texts"),
        ((*EVALUATE, ""), "--tasks '': it names no task"),
        ((*EVALUATE, ",,"), "--tasks ',,': it names no task"),
        ((*EVALUATE, "piqa", "--task-data", "nowhere"), "nowhere: there is no such folder"),
        ((*EVALUATE, "piqa", "--task-data", "."), "for piqa, there is no file piqa.jsonl"),
        (("reproduce", "text", "--data", "nowhere"), "nowhere"),
        (("reproduce", "listops", "--plots-only", "--to", "p"), "a row of its results has no"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value))[:60],
)
def test_a_mistake_is_one_line(words, said):
    Path("mine.html").write_text("mine")
    Path("index.html").write_text("mine")
    Path("t.txt").write_text("To be, or not to be. " * 200)
    Path("short.txt").write_text("ab")
    Path("p").mkdir()
    Path("p/results.jsonl").write_text('{"case": "a"}\n')
    assert said in refused(*words)


@pytest.mark.parametrize("words", [("serve", ZOO), ("explore", ZOO, "--no-browser")])
def test_a_port_that_is_taken(words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "Address already in use" in refused(*words, "--port", port)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "[" * 100_000, "a.json: not a configuration"),
        ("a.toml", "a=" + "[" * 5000, "a.toml: not a configuration"),
        ("a.json", '{"preset": ["debug"]}', "there is no preset ['debug']"),
        ("a.toml", "preset = 3", "there is no preset 3"),
        ("a.json", '{"model": [1]}', "a.json: "),
        ("a.json", '{"model": {"width": 1e400}}', "width = inf"),
        ("a.toml", "iterations = 1979-05-27", "iterations = "),
    ],
)
def test_files_of_fields(name, text, said):
    Path(name).write_text(text)
    assert said in refused("train", name)


def zipped(content, password=False):
    with zipfile.ZipFile("BLiMP.zip", "w") as archive:
        archive.writestr("data/a.jsonl", content)
    if password:
        data = bytearray(Path("BLiMP.zip").read_bytes())
        data[data.find(b"PK\1\2") + 8] |= 1
        data[6] |= 1
        Path("BLiMP.zip").write_bytes(data)


@pytest.mark.parametrize(
    ("task", "make", "said"),
    [
        ("blimp", lambda: Path("BLiMP.zip").write_text("no zip"), "not an archive that can be"),
        ("blimp", lambda: zipped(json.dumps(PAIR), password=True), "is encrypted"),
        ("blimp", lambda: zipped("[" * 100_000), "a.jsonl: line 1: is no JSON"),
        ("blimp", lambda: zipped(json.dumps(PAIR | {"UID": [1]})), "line 1: UID must be there"),
        ("blimp", lambda: zipped(json.dumps(PAIR | {"sentence_bad": ""})), "sentence_bad is empty"),
        ("blimp", lambda: zipped(""), "blimp: there are no questions"),
        ("piqa", lambda: rows(CHOICES | {"choices": ["a", ""]}), "none of them empty"),
        ("piqa", lambda: rows(CHOICES | {"gold": True}), "gold must be there, as int"),
        ("piqa", lambda: rows(CHOICES | {"query": "\ud800"}), "piqa.jsonl: line 1: "),
        ("piqa", lambda: os.mkfifo("piqa.jsonl"), "there is no file piqa.jsonl"),
    ],
)
def test_damaged_benchmarks(task, make, said):
    pytest.importorskip("lm_eval")
    make()
    assert said in refused(*EVALUATE, task, "--task-data", ".")


def rows(*questions):
    Path("piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))


def test_an_archive_that_says_it_is_huge(monkeypatch):
    pytest.importorskip("lm_eval")
    from nrgpt.evaluate.benchmarks import questions

    monkeypatch.setattr(questions, "MOST_BYTES", 100)
    zipped(json.dumps(PAIR) * 2)
    assert "bytes when unpacked, which is no benchmark" in refused(
        *EVALUATE, "blimp", "--task-data", "."
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("\xff,b,c,d,e,1", "not a table of questions"),
        ("x" * 200_000 + ",b,c,d,e,1", "field larger"),
    ],
)
def test_damaged_tables_of_mmlu(row, said):
    pytest.importorskip("lm_eval")
    for split in ("dev", "test"):
        path = Path(split, f"astronomy_{split}.csv")
        path.parent.mkdir()
        head = "question,choice0,choice1,choice2,choice3,answer\n"
        path.write_bytes(f"{head}{row}\n".encode("latin-1"))
    assert said in refused(*EVALUATE, "mmlu_astronomy", "--mmlu", ".")


def test_links_beside_a_page_do_not_matter():
    """The folder of a file that the user has named is not ours."""
    Path("data").symlink_to("elsewhere")
    done = CliRunner().invoke(app, ["explore", ZOO, "--to", "page.html"])
    assert done.exit_code == 0, done.output
    Path("other.html").symlink_to("page.html")
    assert "other.html is a link" in refused("explore", ZOO, "--to", "other.html")
