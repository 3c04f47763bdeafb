"""Other people's tools on an exported model: quantisation, compilation, ONNX, padding."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, TorchAoConfig
from typer.testing import CliRunner

import nrgpt
from nrgpt import zoo
from nrgpt.cli import app
from nrgpt.evaluate.harness import HarnessModel
from nrgpt.hf import export_onnx, export_run, quantise, stored_bytes
from nrgpt.hf.export import wrapped
from nrgpt.hf.onnx_file import Logits
from nrgpt.hf.quantisation import rounded

from ..models import config, randomised

NAME = "shakespeare_certified"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_run(zoo.folder(NAME), tmp_path_factory.mktemp("tools") / "export")


@pytest.fixture
def model(exported):
    return AutoModelForCausalLM.from_pretrained(exported)


@pytest.fixture(scope="module")
def texts():
    loaded = nrgpt.load(f"zoo:{NAME}", device="cpu")
    tokens = loaded.encode((zoo.folder(NAME) / "val.txt").read_text())
    return torch.tensor(tokens[: 8 * 256]).view(8, 256)


@pytest.mark.parametrize(("kind", "share", "cost"), [("int8", 0.45, 0.005), ("int4", 0.35, 0.06)])
def test_quantised_weights_are_small_and_almost_as_good(model, texts, kind, share, cost):
    before, loss = stored_bytes(model), model(texts, labels=texts).loss.item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        small = quantise(model, kind)
    assert stored_bytes(small) < share * before
    assert small(texts, labels=texts).loss.item() == pytest.approx(loss, abs=cost)
    prompt = texts[:1, :20]
    new = small.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5)
    assert new.shape == (1, 25)


@pytest.mark.parametrize("shape", [(7, 33), (4, 64), (3, 34)])
def test_four_bits_are_those_of_torchao(shape):
    """Packed, and each within half a step of where it was; exact where 16 numbers are enough."""
    weight = torch.randint(-7, 8, shape).float()
    weight[:, ::3], weight[:, 1::3] = -7.5, 7.5  # each group spans 15 steps of 1
    linear = torch.nn.Linear(*reversed(shape), bias=False)
    linear.weight.data.copy_(weight)
    packed = rounded(linear, "int4", "W")
    assert packed.pairs.numel() == -(-weight.numel() // 2)
    assert (packed.weight(torch.float32) - weight).abs().max() <= 0.51
    x = torch.randn(2, shape[1])
    assert torch.allclose(packed(x), linear(x), atol=1e-5)  # torchao computes it from its own form


def test_quantisation_that_would_do_nothing_is_refused(exported):
    from torchao.quantization import Int8WeightOnlyConfig

    for option in (
        {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())},
        {"load_in_8bit": True},
    ):
        with pytest.raises(ValueError, match=r"nrgpt\.hf\.quantise\(model, 'int8'\)"):
            AutoModelForCausalLM.from_pretrained(exported, **option)
    with pytest.raises(ValueError, match="kind = 'int2': must be one of 'int8', 'int4'"):
        quantise(randomised(config()), "int2")


@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_on_the_right_changes_nothing(model, texts, use_cache):
    """Neither what is generated nor what is in the cache."""
    lengths = [9, 20, 14]
    ids, mask = torch.full((3, 20), 64), torch.zeros(3, 20, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = texts[row, :length], 1
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": use_cache}
    new = model.generate(ids, attention_mask=mask, **options)[:, 20:]
    for row, length in enumerate(lengths):
        alone = texts[row : row + 1, :length]
        wanted = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert new[row].tolist() == wanted[0, length:].tolist()


def test_attention_weights_come_with_their_padding(model, texts):
    idx = texts[:1, :7]
    wanted = model(idx, output_attentions=True).attentions
    assert len(wanted) == 8
    assert torch.equal(torch.stack(wanted), nrgpt.load(f"zoo:{NAME}").model.attention(idx))
    padded = torch.nn.functional.pad(idx, (3, 0), value=64)
    mask = torch.tensor([[0] * 3 + [1] * 7])
    found = model(padded, attention_mask=mask, output_attentions=True).attentions
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a[..., 3:, 3:], b)
        assert not a[..., :3, :].any()
        assert not a[..., :3].any()
    assert model(idx).attentions is None


def test_num_steps_may_be_chosen_when_it_is_loaded(exported, model, texts):
    """As `lm_eval --model hf --model_args pretrained=...,num_steps=5` does it."""
    few = AutoModelForCausalLM.from_pretrained(exported, num_steps=5)
    idx = texts[:1, :9]
    assert torch.equal(few(idx).logits, model(idx, num_steps=5).logits)
    assert torch.equal(few(idx, num_steps=8).logits, model(idx).logits)
    few.save_pretrained(Path("few"))
    assert AutoModelForCausalLM.from_pretrained("few").config.num_steps == 5


def test_compiled_in_one_piece():
    torch.compiler.reset()
    model = wrapped(randomised(config()).float())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    idx = torch.randint(11, (2, 7))
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            torch.testing.assert_close(
                compiled(idx, **options).logits, model(idx, **options).logits
            )


@pytest.mark.parametrize("own", [{}, {"block": "gpt"}, {"past": "settled", "prelude": 1}])
def test_exported_for_any_length(own):
    logits = Logits(randomised(config(**own)).float(), None)
    shapes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", min=3, max=13)}
    example = torch.zeros(2, 8, dtype=torch.int64)
    program = torch.export.export(logits, (example,), dynamic_shapes=(shapes,)).module()
    for rows, tokens in ((1, 13), (5, 3)):
        idx = torch.randint(11, (rows, tokens))
        torch.testing.assert_close(program(idx), logits(idx))


def test_the_wrapper_is_exported_for_any_batch_and_length():
    model = wrapped(randomised(config()).float())
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", min=3, max=13)}
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    example["attention_mask"] = torch.ones_like(example["input_ids"])
    idx = torch.randint(11, (3, 11))
    mask = torch.ones_like(idx)
    mask[0, :4], mask[1, -3:] = 0, 0
    for names in (["input_ids"], ["input_ids", "attention_mask"]):
        kwargs = {name: example[name] for name in names}
        program = torch.export.export(
            model, (), kwargs, dynamic_shapes=dict.fromkeys(names, shape)
        ).module()
        given = dict(zip(names, (idx, mask), strict=False))
        torch.testing.assert_close(program(**given)["logits"], model(**given).logits)


def test_what_is_quantised_is_neither_saved_nor_quantised_again(exported, tmp_path):
    model = quantise(AutoModelForCausalLM.from_pretrained(exported))
    with pytest.raises(ValueError, match="for memory only: save the model before"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="quantised already"):
        quantise(model, "int4")


def test_onnx(tmp_path):
    model = randomised(config(block="nrgpt")).float()
    before = copy.deepcopy(model.state_dict())
    assert export_onnx(model, tmp_path / "a.onnx", steps=2) < 1e-4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    words = ["export", f"zoo:{NAME}", "--onnx", "--steps", "1", "--to", "model.onnx"]
    for code, said in ((0, "its logits are the model's up to"), (2, "model.onnx exists already")):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == code
        assert said in result.output
    with pytest.raises(ValueError, match=r"must end with \.onnx"):
        export_onnx(model, tmp_path / "model")


def test_the_card_is_one_that_the_hub_reads(exported):
    card = ModelCard.load(exported / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.eval_results[0].metric_value == pytest.approx(1.471, abs=0.01)
    assert "# export" in card.text


def test_the_harness_takes_models_of_the_zoo():
    assert HarnessModel.create_from_arg_string(f"run=zoo:{NAME},steps=3").steps == 3
