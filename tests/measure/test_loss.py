"""nrgpt evaluate: losses in nats and bits, and what is printed and written."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.data.shards import TokenStream
from nrgpt.data.tokenizer import GPT2_RANKS, GPT2Tokenizer, SymbolTokenizer
from nrgpt.evaluate.record import read_record, write_record
from nrgpt.kernels.loss import plain_loss
from nrgpt.measure import loss as loss_module
from nrgpt.measure.loss import SplitLoss, bits_of_text, split_loss

from ..characters import character_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return character_run(tmp_path_factory.mktemp("characters"))


def nrgpt(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


def test_bits_per_character(run):
    tokens = run.dataset().tokens("val")
    loss = split_loss(run.model, tokens)
    bits = bits_of_text(loss, tokens, run.tokenizer)
    assert (bits.unit, bits.units) == ("character", len(tokens) - 1)
    assert bits.per_unit == pytest.approx(loss.loss / math.log(2))


@pytest.mark.parametrize("stride", [None, 1, 24])
def test_every_token_once(run, stride, monkeypatch):
    """Compare with one window per token, and check that few unneeded logits are computed."""
    model, made = run.model, []

    def spy(logits, *others, **options):
        made.append(logits[..., 0].numel())
        return plain_loss(logits, *others, **options)

    text = run.dataset().tokens("val").read(0, 150)
    monkeypatch.setattr(loss_module, "plain_loss", spy)
    found = split_loss(model, TokenStream("val", [text]), stride=stride)
    assert found.tokens == len(text) - 1 <= sum(made) < len(text) + model.cfg.context
    context, stride, losses = model.cfg.context, stride or model.cfg.context // 4, []
    for n in range(1, len(text)):
        group = max(0, -(-(n - context) // stride))
        start = min(context + group * stride, len(text) - 1) - context
        logits, _ = model(torch.from_numpy(text[start:n])[None].long())
        losses.append(-logits[0, -1].log_softmax(-1)[text[n]].item())
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.skipif(
    GPT2_RANKS not in os.environ, reason=f"needs GPT-2's vocabulary: {GPT2_RANKS} names it"
)
def test_bits_per_byte():
    tokenizer = GPT2Tokenizer()
    text = "The naïve café — 東京 🙂 costs 3 €."
    tokens = [tokenizer.end_of_text, *tokenizer.encode(text), tokenizer.end_of_text]
    shards = [np.array(tokens[:4], np.uint16), np.array(tokens[4:], np.uint16)]
    loss = SplitLoss(2.0, len(tokens) - 1, 1)
    bits = bits_of_text(loss, TokenStream("val", shards), tokenizer)
    assert (bits.unit, bits.units) == ("byte", len(text.encode()))
    assert bits.per_unit == pytest.approx(2 * (len(tokens) - 1) / math.log(2) / bits.units)


def test_symbols_that_are_not_text_have_no_bits():
    stream = TokenStream("val", [np.zeros(3, np.uint16)])
    assert bits_of_text(SplitLoss(1.0, 2, 1), stream, SymbolTokenizer(["max", "("])) is None


def test_what_is_shown_and_what_is_written(run):
    said = nrgpt("evaluate", run.folder)
    assert "character" in said
    nrgpt("evaluate", run.folder, "--steps", 5, "--stride", 24)
    nrgpt("evaluate", run.folder, "--steps", 5, "--stride", 24)
    trained, longer = read_record(run.folder)
    tokens = run.dataset().tokens("val")
    expected = split_loss(run.model, tokens)
    assert trained["loss"]["loss"] == pytest.approx(expected.loss)
    assert trained["bits"]["per_unit"] == pytest.approx(expected.loss / math.log(2))
    assert f"{expected.loss:.4f} nats" in said
    assert trained["settings"] == {
        "checkpoint": run.step, "steps": 3, "split": "val", "stride": None,
    }  # fmt: skip
    expected = split_loss(run.model, tokens, steps=5, stride=24)
    assert longer["loss"]["loss"] == pytest.approx(expected.loss)
    assert longer["loss"]["least_context"] == 25


def test_mistakes(run, tmp_path):
    assert "split = 'test'" in nrgpt("evaluate", run.folder, "--split", "test", code=2)
    assert "stride = 99" in nrgpt("evaluate", run.folder, "--stride", "99", code=2)
    assert "steps = 0" in nrgpt("evaluate", run.folder, "--steps", "0", code=2)


@pytest.mark.parametrize("content", ["{", "[]", '{"entries": [{}]}', '{"entries": 3}'])
def test_a_broken_record_is_not_overwritten(tmp_path, content):
    path = tmp_path / "evaluation.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="move it away"):
        write_record(tmp_path, {}, {})
    assert path.read_text() == content


def test_results_of_the_same_settings_join(tmp_path):
    write_record(tmp_path, {"a": (1, 2)}, {"x": 1})
    write_record(tmp_path, {"a": [1, 2]}, {"y": 2})
    write_record(tmp_path, {"a": None}, {"x": 3})
    assert json.loads((tmp_path / "evaluation.json").read_text())["entries"] == [
        {"settings": {"a": [1, 2]}, "x": 1, "y": 2},
        {"settings": {"a": None}, "x": 3},
    ]


def test_heavy_packages_are_imported_only_where_used():
    program = (
        "import sys, nrgpt.cli, nrgpt.evaluate.mmlu, nrgpt.evaluate.samples, nrgpt.evaluate.tasks\n"
        "import nrgpt.evaluate.text\n"
        "heavy = {'datasets', 'lm_eval', 'sentence_transformers', 'spellchecker', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
