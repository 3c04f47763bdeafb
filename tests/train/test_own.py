"""A training on one's own text, from the command line: one command, which goes on if stopped."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

import nrgpt
from nrgpt.cli import app
from nrgpt.data.own import byte_pairs, tokenizer_for, usual_vocabulary
from nrgpt.data.shards import Dataset
from nrgpt.data.text import prepare_text
from nrgpt.data.tokenizer import FastTokenizer, GPT2Tokenizer, load_tokenizer
from nrgpt.hf import export_run

from ..data.test_tokenizer import use_small_ranks

TEXT = "The sun rises in the east. It sets in the west, and the night is long.\n" * 60
SMALL = [
    "iterations=4", "optimiser.warmup=1", "batch=2", "eval_batches=1", "eval_every=2",
    "save_every=2", "model.width=16", "model.steps=2", "model.context=32",
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("NRGPT_DATA", str(tmp_path / "prepared"))


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def test_one_command_is_all_it_takes():
    Path("my.txt").write_text(TEXT)
    said = run("train", "--text", "my.txt", *SMALL)
    (folder,) = Path("runs").iterdir()
    assert str(folder) in said
    assert "validation loss" in said
    assert len(said.splitlines()) < 25
    result = json.loads((folder / "result.json").read_text())
    model = nrgpt.load(folder)
    assert model.tokenizer.kind == "characters"
    assert model.model.cfg.vocab_size == len(set(TEXT))
    (data,) = (d for d in Path("prepared").iterdir() if d.is_dir())
    shutil.rmtree(data)  # the run has all that it needs
    assert run("sample", folder, "--prompt", "The ", "--tokens", 5).startswith("The ")
    # The same command goes on: with more iterations, in the same folder if it is named.
    said = run("train", "--text", "my.txt", *SMALL, "iterations=6", "--to", folder)
    assert "resuming from" in said
    again = json.loads((folder / "result.json").read_text())
    assert (result["step"], again["step"]) == (4, 6)
    assert again["dataset"] == result["dataset"]


def test_byte_pairs_of_ones_own_travel_everywhere(tmp_path):
    Path("my.txt").write_text(TEXT)
    run("train", "--text", "my.txt", "--tokenizer", "bpe", "--vocabulary", 280, *SMALL, "--to", "r")
    model = nrgpt.load("r")
    assert model.tokenizer.kind == "byte pairs"
    assert model.tokenizer.vocab_size == 280
    assert model.decode(model.encode("Ünïcode 🙂\n")) == "Ünïcode 🙂\n"
    assert model.tokenizer.end_of_text not in model.encode("a<|endoftext|>b")
    export_run(Path("r"), Path("export"))
    theirs = AutoTokenizer.from_pretrained("export")
    assert theirs("the night 🙂").input_ids == model.encode("the night 🙂")
    exported = nrgpt.load("export")
    assert exported.encode("the night 🙂") == model.encode("the night 🙂")
    options = {"max_new_tokens": 5, "temperature": 0}
    assert exported.generate("The", **options) == model.generate("The", **options)
    assert "byte" in run("evaluate", "r")


def test_tokenizers_by_size_and_their_round_trip():
    texts = lambda: ["naïve café", "zwei"]  # noqa: E731
    made = tokenizer_for("auto", texts, 100)
    assert made.kind == "characters"
    assert made.encode("zwei")[0] != made.end_of_text
    assert made.decode([made.end_of_text]) == "<|endoftext|>"  # between the two documents
    many = tokenizer_for("auto", lambda: ["".join(map(chr, range(0x4E00, 0x4F90)))], 1_200, None)
    assert many.kind == "byte pairs"
    assert [usual_vocabulary(size) for size in (1, 10**6, 4 * 10**6, None)] == [
        512, 512, 2_048, 32_768,
    ]  # fmt: skip
    pairs = byte_pairs(["aaab aaab"] * 5, 260)
    again = load_tokenizer(json.loads(json.dumps(pairs.spec())))
    assert isinstance(again, FastTokenizer)
    assert again.encode("aaab x") == pairs.encode("aaab x")
    assert sum(pairs.byte_lengths()[t] for t in pairs.encode("aaab ü")) == len("aaab ü".encode())
    with pytest.raises(ValueError, match="vocabulary = 100: must be at least 257"):
        byte_pairs(["a"], 100)
    with pytest.raises(ValueError, match="'characters' has its own"):
        tokenizer_for("characters", texts, 9, 300)


def test_validation_suits_the_text(tmp_path):
    """A single book gives its end; many documents give some of them."""
    (tmp_path / "book.txt").write_text(TEXT)
    prepare_text([tmp_path / "book.txt"], tmp_path / "book", progress=False)
    book = Dataset.open(tmp_path / "book")
    sizes = {split: len(book.tokens(split)) for split in ("train", "val")}
    assert sizes["val"] == len(TEXT) // 10
    assert sum(sizes.values()) == len(TEXT)
    whole = [
        *book.tokens("train").read(0, sizes["train"]),
        *book.tokens("val").read(0, sizes["val"]),
    ]
    assert book.tokenizer.decode(whole) == TEXT
    lines = [json.dumps({"text": f"document {i} {'x' * 300}"}) for i in range(2_000)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    prepare_text([tmp_path / "many.jsonl"], tmp_path / "many", progress=False, validation=0.2)
    many = Dataset.open(tmp_path / "many")
    assert 0.15 < len(many.tokens("val")) / len(many.tokens("train")) < 0.35


def test_data_and_trainings_find_each_other():
    Path("my.txt").write_text(TEXT)
    said = run("data", "text", "my.txt", "--tokenizer", "auto")
    assert "vocabulary" in said
    size = Dataset.open(Path("prepared/text")).vocab_size
    here = ["train", "shakespeare_cpu", *SMALL, f"model.vocab_size={size}", "data.task=text"]
    run(*here, "--to", "a")  # the usual place
    advice = said.split("train on it with ")[1].split("\n")[0]
    run("train", "shakespeare_cpu", *SMALL, *shlex.split(advice), "--to", "advised")
    Path("prepared/text").rename("prepared/mine")
    run(*here, "data.folder=mine", "--to", "b")  # by name, in NRGPT_DATA
    assert "data.folder" in run(*here, "data.folder=other", "--to", "c", code=2)
    assert run("data", "verify", "mine")
    for command in ("listops", "text", "hub", "shakespeare"):
        assert "--to" in run("data", command, "--help")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "no.txt"], "no.txt: there is no such file"),
        ([], "name a preset"),
        (["--text", "tiny.txt"], "too few"),
        (["--text", "my.txt", "--tokenizer", "words"], "tokenizer = 'words': must be one of"),
        (["--text", "my.txt", "--tokenizer", "characters", "--vocabulary", "9"], "has its own"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(words, said):
    Path("my.txt").write_text(TEXT)
    Path("tiny.txt").write_text("Hardly any text.")
    assert said in run("train", *words, code=2)
    assert not Path("runs").exists()


def test_gpt2s_vocabulary_travels_and_is_missed_at_the_start(tmp_path, monkeypatch):
    """A dataset carries GPT-2's ranks. A training on one without them says so before it begins."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ranks").mkdir()
    use_small_ranks(monkeypatch, tmp_path / "ranks")
    Path("my.txt").write_text(TEXT)
    run("data", "text", "my.txt", "--tokenizer", "gpt2", "--to", "gpt2")
    monkeypatch.setenv("NRGPT_GPT2_RANKS", "nowhere")
    words = ["train", "shakespeare_cpu", *SMALL, "data.task=text", "model.vocab_size=50304"]
    without = "final_evaluation=false"  # the small ranks cannot decode what it writes
    run(*words, "data.folder=gpt2", "--to", "r", without)
    assert run("sample", "r", "--prompt", "hell", "--tokens", 0).startswith("hell")
    assert isinstance(nrgpt.load("r").tokenizer, GPT2Tokenizer)
    # As older versions prepared it:
    (tmp_path / "gpt2" / "gpt2.tiktoken").unlink()
    manifest = json.loads((tmp_path / "gpt2" / "manifest.json").read_text())
    manifest["extra_files"] = {}
    (tmp_path / "gpt2" / "manifest.json").write_text(json.dumps(manifest))
    said = run(*words, "data.folder=gpt2", "--to", "s")
    assert "samples.txt will hold numbers instead of text: NRGPT_GPT2_RANKS = nowhere" in said
