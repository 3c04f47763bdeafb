"""The command line as a user types it."""

import errno
import sys

import pytest
from typer.testing import CliRunner

from nrgpt import __version__ as nrgpt_version
from nrgpt.cli import app
from tests.processes import finished
from tests.runs import command

ZOO = "zoo:listops_30_steps"
QUICK = ["iterations=6", "eval_every=6", "eval_batches=1", "data.listops.test=5"]


def nrgpt(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "debugg"], "there is no preset 'debugg'; did you mean 'debug'?"),
        (["train", "debug", "model.widht=8"], "no field 'model.widht'; did you mean"),
        (["train", "debug", "--model.width=9"], "heads = 2: must be a divisor of width = 9"),
        (["train", "debug", "model.width"], "write name=value"),
        (["train", "debug", "model.width={[]: 1}"], "width = '{[]: 1}': must be"),
        (["train", "debug", "device=gpu"], "device = 'gpu': must be one of 'auto', 'cpu', 'cuda'"),
        (["sample", "nowhere"], "nowhere is not a run"),
        (["evaluate", "nowhere"], "nowhere is not a run"),
        (["adaptive", ZOO, "--tolerances", "x"], "tolerances = 'x': must be numbers"),
        (["adaptive", ZOO, "--rule", "x"], "rule = 'x': must be one of"),
        (["train", "owt_gpt"], "nrgpt data text --to"),
        (["data", "listops", "--to", "x", "modulos=3"], "did you mean 'modulus'?"),
        (["train", "debug", "--to", f"{__file__}/run"], "Not a directory; choose another path"),
        (["reproduce", "listops", "--quick", "--to", __file__], "test_cli.py: File exists"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(arguments, said):
    output = nrgpt(*arguments, code=2)
    assert said in output
    assert "Traceback" not in output


def test_train_sample_evaluate(tmp_path):
    said = nrgpt("train", "debug", "--to", "mine", *QUICK, "--model.width=8")
    assert "everything is in mine" in said
    assert nrgpt("sample", "mine", "--prompt", "sum(1, 2)", "--tokens", "3").startswith("sum(1,2)")
    assert nrgpt("sample", "mine", "--tokens", "3").startswith("<end> ")
    assert "'?' in 'sum(?)': this ListOps knows" in nrgpt(
        "sample", "mine", "--prompt", "sum(?)", code=2
    )
    said = nrgpt("evaluate", "mine", "--steps", "4")
    assert "val loss" in said
    assert "answers" in said
    assert "mine keeps step-" in nrgpt("evaluate", "mine", "--checkpoint", "99", code=2)
    assert "mine keeps step-" in nrgpt("evaluate", "mine", "--step", "99", code=2)  # old name


def test_a_changed_preset_gets_a_folder_of_its_own(tmp_path):
    nrgpt("train", "debug", *QUICK)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("debug-")


def test_prepared_data_is_checked(tmp_path):
    nrgpt("data", "listops", "--to", "lo", "--released", "train=50", "validation=5", "test=5")
    assert "val:" in nrgpt("data", "verify", "lo")
    path = tmp_path / "lo" / "val-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert "val-00000.bin" in nrgpt("data", "verify", "lo", code=2)


def test_the_best_checkpoint_may_be_gone(tmp_path):
    nrgpt("train", "debug", "--to", "mine", "iterations=30", "save_every=5", "eval_every=10")
    newest = tmp_path / "mine" / "checkpoints" / "step-00000030"
    (newest / "model.safetensors").write_bytes(b"")
    result = CliRunner().invoke(app, ["evaluate", "mine"])
    assert result.exit_code == 0, result.output
    assert "checkpoint 25;" in result.output
    assert "step-00000030/model.safetensors: 0 bytes where" in result.output


def test_a_dataset_that_is_not_the_one_asked_for(tmp_path):
    nrgpt("data", "listops", "--to", "lo", "--released", "train=50", "validation=5", "test=5")
    said = nrgpt("train", "debug", "data.folder=lo", "data.listops.modulus=3", code=2)
    assert "modulus = 10, not 3" in said
    said = nrgpt("train", "shakespeare_gpt", "data.folder=lo", code=2)
    assert "holds listops, not shakespeare" in said
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/config.json"))


def test_a_full_disk_outside_of_a_checkpoint(monkeypatch):
    def full(cfg, folder):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("nrgpt.cli.training.train_run", full)
    said = nrgpt("train", "debug", code=4)
    assert "the disk is full" in said
    assert "metrics.jsonl" in said


def test_certificate_and_adaptive(tmp_path):
    nrgpt("train", "debug", "--to", "mine", *QUICK)
    said = nrgpt("certificate", "mine", "--texts", "2")
    assert "no descent is proved" in said
    assert "frozen past" in said
    said = nrgpt("convergence", "mine", "--texts", "2", "--steps", "20", "--to", "rest")
    assert "in parallel" in said
    assert len(list((tmp_path / "rest").glob("*.png"))) == 2
    said = nrgpt("adaptive", "mine", "--rule", "kl", "--texts", "2", "--to", "costs.png")
    assert "all steps" in said
    assert (tmp_path / "costs.png").stat().st_size > 1_000
    assert "did you mean 'energy'" in nrgpt("adaptive", "mine", "--rule", "enery", code=2)
    nrgpt("train", "debug", "--to", "plain", "model.block=rgpt", *QUICK)
    assert "has no energy" in nrgpt("adaptive", "plain", code=2)


def test_the_outline_says_what_the_commands_say():
    """Shown without loading torch."""
    told = finished(command("--help"))
    assert told.returncode == 0
    assert (
        told.stdout.split() == CliRunner().invoke(app, ["--help"], prog_name="nrgpt").stdout.split()
    )
    assert finished(command("--version")).stdout == f"nrgpt {nrgpt_version}\n"
    assert nrgpt("--version") == f"nrgpt {nrgpt_version}\n"
    code = "import sys, nrgpt.cli; sys.argv = ['nrgpt', '--help']\n"
    code += "try: nrgpt.cli.main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = finished([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "debug", "random_steps=('a','b')"], "must hold nothing but int"),
        (["train", "debug", "random_steps=(1.5,2.5)"], "must hold nothing but int"),
        (["train", "debug", "optimiser.weight_decay=1e999"], "decay = inf: must be a finite"),
        (["train", "debug", "model.width=10000000"], "takes at least"),
        (["train", "debug", "model.vocab_size=9000000000000000000"], "more numbers than can be"),
        (["train", "debug", "model.width=99999999999999999999"], "must be below 2^63"),
        (["train", "debug", "batch=1000000000"], "GiB of memory"),
        (["train", "debug", "--to", "x" * 300], "File name too long; choose another path"),
        (["train", "debug", "data.folder="], "data.folder = '': must be a folder's path"),
        (["train", "debug", "device=mps"], "this machine has no Apple GPU"),
        (["export", ZOO, "--to", "."], "is the present folder; name a new one"),
        (["verify", "nowhere"], "nowhere is not a run"),
        (["sample", ZOO, "--checkpoint", "99999999999"], "keeps step-"),
    ],
)  # fmt: skip
def test_more_mistakes_get_one_line(arguments, said):
    output = nrgpt(*arguments, code=2).replace("\n", "")
    assert said in output
    assert "Traceback" not in output


def test_extreme_sampling():
    for options in (["--temperature", "1e-45"], ["--top-p", "1e-300"]):
        assert nrgpt("sample", ZOO, "--tokens", "3", *options)


def test_markup_in_a_path_is_text(tmp_path):
    said = nrgpt("train", "debug", "--to", "runs[red]/x[/b]:smile:", *QUICK)
    assert "everything is in runs[red]/x[/b]:smile:" in said.replace("\n", "")


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("lm_eval", ["--tasks", "mmlu"], "--tasks needs lm_eval"),
        ("spellchecker", ["--metrics", "--judge", "none"], "--metrics needs spellchecker"),
        ("sentence_transformers", ["--metrics", "--judge", "none"], "pip install 'nrgpt[eval]'"),
        ("transformers", ["--metrics"], "pip install 'nrgpt[eval]'"),
        (None, ["--tasks", "nothing_like_it"], "a task that lm-eval knows"),
        (None, ["--tasks", "mmlu", "--mmlu", "nowhere"], "nowhere: there is no such folder"),
    ],
)
def test_evaluate_asks_first_for_what_it_needs(monkeypatch, module, arguments, said):
    """Packages, tasks and files, before any work."""
    monkeypatch.setattr("nrgpt.cli.evaluation.losses", lambda *_: pytest.fail("it went to work"))
    if module:
        monkeypatch.setitem(sys.modules, module, None)
    output = nrgpt("evaluate", "zoo:shakespeare_certified", *arguments, code=2)
    assert said in " ".join(output.split())


def test_fields_are_explained():
    said = nrgpt("fields", "model.rate")
    assert "model.rate = free" in said
    assert "[bold]" not in said


def test_evaluate_finds_out_first_that_it_cannot_write(tmp_path, monkeypatch):
    nrgpt("train", "debug", "--to", "mine", *QUICK)
    (tmp_path / "mine" / "evaluation.json").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr("nrgpt.cli.evaluation.losses", lambda *_: pytest.fail("it went to work"))
    said = nrgpt("evaluate", "mine", code=2)
    assert "evaluation.json is a link, and will not be written to" in said.replace("\n", "")
    assert not (tmp_path / "elsewhere").exists()
