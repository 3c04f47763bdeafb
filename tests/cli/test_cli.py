"""The command line as a user types it."""

import errno

import pytest
from typer.testing import CliRunner

from nrgpt.cli import app

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
    assert "no descent guaranteed" in said
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
