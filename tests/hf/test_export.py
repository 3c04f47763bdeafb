"""Exports: what they contain, how they can be loaded, and what is refused."""

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import HF_TOKEN_PATH
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from typer.testing import CliRunner

from nrgpt import load as nrgpt_load
from nrgpt.cli import app
from nrgpt.hf import export_run, push_run
from nrgpt.kernels import dispatch
from nrgpt.train.loop import train
from nrgpt.train.overrides import override
from nrgpt.train.presets import PRESETS
from nrgpt.train.runs import load_run
from tests.processes import patience


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny NRGPT, trained for a few iterations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRGPT_DATA", str(tmp_path_factory.getbasetemp() / "data"))
        folder = tmp_path_factory.mktemp("hf") / "run"
        train(override(PRESETS["debug"](), ["iterations=40"]), folder)
    return folder


@pytest.fixture(scope="module")
def exported(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRGPT_DATA", str(run.parents[1] / "data"))
        return export_run(run, run.parent / "exported")


@pytest.fixture
def copied(exported, tmp_path):
    """A copy of the export that a test may damage."""
    return shutil.copytree(exported, tmp_path / "copied")


def python(code, folder, **environment):
    """Run code in a new process in which nrgpt is not installed."""
    without = (
        "import importlib.machinery, importlib.util, sys\n"
        "sys.path = [p for p in sys.path if not importlib.util.find_spec('nrgpt') or"
        " importlib.machinery.PathFinder.find_spec('nrgpt', [p]) is None]\n"
        "sys.modules.pop('nrgpt', None); importlib.invalidate_caches()\n"
        "assert importlib.util.find_spec('nrgpt') is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", without + code, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder.parent,
        env={**os.environ, "HF_HOME": str(folder.parent / "hf"), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logits_are_equal_bit_for_bit(run, exported):
    ours = load_run(run).model
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    idx = torch.randint(17, (4, 32))
    assert torch.equal(theirs(idx).logits, ours(idx)[0])
    assert theirs.config.model_config() == ours.cfg
    prompts = idx[:, :9]
    # Without a mask, transformers would treat <end> in the prompts as padding.
    mask = torch.ones_like(prompts)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    new = theirs.generate(prompts, attention_mask=mask, **options)
    assert new[:, 9:].tolist() == ours.generate(prompts.tolist(), max_new_tokens=12)


def test_the_tokenizer_and_the_pipeline(run, exported):
    loaded = load_run(run)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "max(1,sum(2,3)) ="
    assert tokenizer(text).input_ids == loaded.encode(text)
    write = pipeline("text-generation", model=str(exported), tokenizer=tokenizer)
    prompts = [text, "sum(4,5) =", "median(1,2,3) ="]
    stop = tokenizer.eos_token_id
    ours = loaded.model.generate(
        [loaded.encode(prompt) for prompt in prompts], max_new_tokens=9, stop=stop
    )
    options = {"max_new_tokens": 9, "do_sample": False, "return_full_text": False}
    for batch_size in (1, 3):
        said = [
            row[0]["generated_text"] for row in write(prompts, batch_size=batch_size, **options)
        ]
        assert said == [loaded.decode(tokens) for tokens in ours]
    assert write("", **options)  # starts with <end>
    # Past the context.
    long = write(text, do_sample=False, eos_token_id=-1, max_new_tokens=60)
    assert len(tokenizer(long[0]["generated_text"]).input_ids) == len(loaded.encode(text)) + 60
    with pytest.raises(ValueError, match="'one' at position 4 is not in this vocabulary"):
        write("max(one)")


def test_the_card(run, exported):
    card = (exported / "README.md").read_text()
    result = json.loads((run / "result.json").read_text())
    counts = result["parameters"]
    for said in (
        "ListOps",
        f"{counts['tied']:,}",
        f"{counts['untied']:,}",
        f"{result['val_loss_full']:.4f} nats",
        str(load_run(run).model.certificate()),
        "![Energies over the steps](energies.png)",
        "An Energy-based Alternative for {GPT}",
        "trust_remote_code=True",
    ):
        assert said in card
    assert (exported / "energies.png").read_bytes().startswith(b"\x89PNG")
    assert str(run.parent) not in card
    code = card.split("```python")[1].split("```")[0]
    exec(code.replace('"exported"', repr(str(exported))), {})


def test_a_card_of_a_baseline_that_has_no_result(tmp_path):
    train(override(PRESETS["debug"](), ["iterations=6", "model.block=gpt"]), tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    folder = export_run(tmp_path / "run", tmp_path / "exported", name="my gpt")
    card = (folder / "README.md").read_text()
    assert "# my gpt" in card
    for absent in ("energy go down", "num_steps", "validation loss"):
        assert absent not in card
    assert not (folder / "energies.png").exists()


def test_loaded_by_someone_without_nrgpt(exported, tmp_path):
    code = """
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["max(1,sum(2,3)) =", "sum(4,5) ="], padding=True, return_tensors="pt")
options = {"max_new_tokens": 6, "do_sample": False}
new = model.generate(**inputs, **options)
assert torch.equal(new, model.generate(**inputs, **options, num_beams=1, use_cache=False))
assert set(model(**inputs, output_energies=True).energies) == {"attention", "feedforward"}
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
assert torch.equal(again(**inputs).logits, model(**inputs).logits)
assert AutoModel.from_pretrained(folder, trust_remote_code=True).config.width == 16
assert "nrgpt" not in sys.modules
print(new.tolist())
"""
    folder = shutil.copytree(exported, tmp_path / "copied")
    printed = python(code, folder).strip().splitlines()[-1]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer(["max(1,sum(2,3)) =", "sum(4,5) ="], padding=True, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert (
        json.loads(printed) == model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()
    )


def test_a_target_that_is_taken_and_one_that_fails(run, tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        export_run(run, taken)
    (taken / "mine.txt").unlink()

    def fail(*arguments):
        raise RuntimeError("no card today")

    with monkeypatch.context() as patch:
        patch.setattr("nrgpt.hf.export.write_card", fail)
        with pytest.raises(RuntimeError, match="no card today"):
            export_run(run, taken)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert not list(taken.iterdir())
    assert (export_run(run, taken) / "config.json").is_file()


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("opened",)


def test_pickles_are_refused_and_never_opened(copied):
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    load = AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"pytorch_model.bin and no model.safetensors: pickle"):
        load(copied)
    with pytest.raises(ValueError, match="pickle files are never opened"):
        load(copied, use_safetensors=False)
    assert not os.path.exists("opened")


@pytest.mark.parametrize("file", ["w.bin", "../w.safetensors"])
def test_an_index_may_name_nothing_but_safetensors(copied, file):
    (copied / "model.safetensors").unlink()
    (copied / "w.bin").write_bytes(pickle.dumps(Malicious()))
    index = {"metadata": {}, "weight_map": {"language_model.tokens": file}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"names '{file}': only safetensors"):
        AutoModelForCausalLM.from_pretrained(copied)
    (copied / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is not an index of weights"):
        AutoModelForCausalLM.from_pretrained(copied)
    assert not os.path.exists("opened")


def test_exports_of_listops_answer_greedily(copied):
    config = json.loads((copied / "generation_config.json").read_text())
    assert config["do_sample"] is False


def test_code_in_a_folder_is_not_run_where_nrgpt_is_installed(copied):
    for name in ("configuration_nrgpt", "modeling_nrgpt"):
        (copied / f"{name}.py").write_text("import os\nos.mkdir('opened')\n")
    assert AutoModelForCausalLM.from_pretrained(copied).config.width == 16
    assert not os.path.exists("opened")


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
         "model.safetensors", "checksums.json")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_changed_is_named(copied, name):
    """A flipped digit would change what the model says, and nobody would know."""
    path = copied / name
    content = path.read_bytes()
    if name == "config.json":
        changed = content.replace(b'"norm_eps": 1e-05', b'"norm_eps": 1e-02')
    else:
        at = max(content.rfind(digit) for digit in b"0123456789")
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    path.write_bytes(changed)
    assert changed != content
    said = "has changed" if name == "checksums.json" else f"{name} has changed; restore it or, if"
    readers = [nrgpt_load, AutoModelForCausalLM.from_pretrained]
    for read in readers:
        with pytest.raises(ValueError, match=said):
            read(copied)
    assert said in nrgpt("verify", copied, code=2)
    assert said in nrgpt("train", "debug", f"init_from={copied}", "--to", "x", code=2)
    if name != "model.safetensors":  # anything may have come of its numbers
        nrgpt("verify", copied, "--accept-changes", code=0)
        for read in readers:
            read(copied)


def test_a_model_that_is_saved_again_has_no_checksums(copied):
    """It is another one. And exports of earlier versions have none."""
    model = AutoModelForCausalLM.from_pretrained(copied)
    with torch.no_grad():
        model.language_model.tokens.add_(1)
    model.save_pretrained(copied)
    assert not (copied / "checksums.json").exists()
    AutoModelForCausalLM.from_pretrained(copied)
    nrgpt_load(copied)
    assert nrgpt("verify", copied, code=0) == ""
    assert "nothing had changed" in nrgpt("verify", copied, "--accept-changes", code=0)
    assert (copied / "checksums.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "[" * 5000, "config.json is not JSON"),
        ("config.json", "[1]", "is not a run|holds list"),
        (
            "config.json",
            '{"model_type": "nrgpt", "width": "a"}',
            "width = 'a': must be of type int",
        ),
        ("config.json", '{"model_type": "nrgpt", "width": 4608}', "does not fit its weights"),
        ("model.safetensors", "x" * 100, "model.safetensors: not a file of tensors"),
        ("tokenizer.json", "[" * 5000, "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
    ],
)
def test_damage_without_checksums_is_named(copied, name, content, said):
    (copied / "checksums.json").unlink()
    (copied / name).write_text(content)
    with pytest.raises((ValueError, OSError), match=said):
        nrgpt_load(copied)


def rewrite(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_broken_folders(copied):
    """Without checksums, as after save_pretrained."""
    (copied / "checksums.json").unlink()
    load = AutoModelForCausalLM.from_pretrained
    config, weights = copied / "config.json", copied / "model.safetensors"
    whole, content = config.read_text(), weights.read_bytes()
    rewrite(config, widht=3)
    with pytest.raises(ValueError, match="no field 'widht'; did you mean 'width'"):
        load(copied)
    config.write_text(whole)
    rewrite(config, rate="gamma")
    with pytest.raises(ValueError, match=r"do not fit their config.json; missing: .*log_c"):
        load(copied)
    config.write_text(whole)
    rewrite(config, width=32)
    with pytest.raises((ValueError, RuntimeError), match="mismatch"):
        load(copied)
    config.write_text(whole)
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(Exception, match=r"(?i)safetensors|incomplete|invalid"):
        load(copied)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        load(copied)
    config.unlink()
    with pytest.raises((OSError, ValueError), match=r"config.json|model_type"):
        load(copied)


def nrgpt(*arguments, code):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_the_command_line(run, tmp_path, monkeypatch):
    assert "will load it" in nrgpt("export", run, "--to", "out", code=0)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert "exists and is not an empty" in nrgpt("export", run, "--to", "out", code=2)
    assert "nowhere is not a run" in nrgpt("export", "nowhere", "--to", "x", code=2)
    assert "keeps step-" in nrgpt("export", run, "--to", "x", "--step", "7", code=2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "nrgpt.hf.export")
    assert "pip install 'nrgpt[hf]'" in nrgpt("export", run, "--to", "x", code=2)


def test_push_says_what_is_wrong(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if not os.path.exists(HF_TOKEN_PATH):
        assert "not logged in" in nrgpt("push", run, "--repo", "me/mine", code=2)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    assert "must be NAME or OWNER/NAME" in nrgpt("push", run, "--repo", "a/b/c", code=2)
    # A local address without a server.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the Hub cannot be reached"):
        push_run(run, "me/mine")


def test_the_how_to(exported):
    """The code in docs/hugging-face.md that needs no training and no Hub."""
    text = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
    use = text.split("```python")[1].split("```")[0]
    names = {}
    exec(use.replace('"demo-hf"', repr(str(exported))).replace("min(", "sum("), names)
    assert set(names["energies"]) == {"attention", "feedforward"}


def test_exported_code_goes_without_triton_kernels(exported):
    """They are not exported, so plain operations must be used on a GPU."""
    path = exported / "nrgpt_kernels_dispatch.py"
    spec = importlib.util.spec_from_file_location("exported_dispatch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert dispatch.HAS_KERNELS
    assert not module.HAS_KERNELS
    assert not module.HAS_TRITON


def test_names_do_not_write_the_card(run, tmp_path):
    name = 'x"; import os  # `a` <b> [c](d)'
    card = (export_run(run, tmp_path / name) / "README.md").read_text(encoding="utf-8")
    code = card.split("```python")[1].split("```")[0]
    assert f"name = {json.dumps(name)}  #" in code
    title = next(line for line in card.splitlines() if line.startswith("# "))
    assert "\\<b\\>" in title
    assert "\\[c\\]" in title


def test_what_a_killed_export_left_is_cleared(run, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(patience())
    (tmp_path / f".mine.{dead.pid}").mkdir()
    export_run(run, tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
