"""Hugging Face's GPT-2 and our GPT baseline compute the same."""

import dataclasses
import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from nrgpt import LanguageModel
from nrgpt.hf import from_gpt2, to_gpt2
from nrgpt.interop.weights import check_folder

from .. import reference
from ..models import config, randomised, relative, tokens, weights

SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "n_positions": 20}
ENDS = {"bos_token_id": None, "eos_token_id": None}


def gpt2(**fields):
    model = GPT2LMHeadModel(GPT2Config(**SIZES, **ENDS, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation_function": "gelu", "n_inner": 64, "layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "relu"},
    ],
    ids=str,
)
def test_there_and_back(fields):
    theirs = gpt2(**fields)
    ours = from_gpt2(theirs)
    idx = torch.randint(50, (3, 20))
    expected = theirs(idx).logits
    assert (ours(idx)[0] - expected).abs().max() < 1e-5
    again = to_gpt2(ours)
    assert (again(idx).logits - expected).abs().max() < 1e-5
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    new = theirs.generate(idx[:, :5], max_new_tokens=8, do_sample=False)
    assert ours.generate(idx[:, :5].tolist(), max_new_tokens=8) == new[:, 5:].tolist()


def test_a_gpt_without_biases():
    model = randomised(config(block="gpt")).float()
    idx = torch.randint(11, (3, 13))
    assert (to_gpt2(model)(idx).logits - model(idx)[0]).abs().max() < 1e-5


def test_weights_that_do_not_fit_their_config(tmp_path):
    gpt2().save_pretrained(tmp_path)  # two layers
    config = tmp_path / "config.json"
    for layers, kind in ((3, "missing"), (1, "unexpected")):
        config.write_text(json.dumps({**json.loads(config.read_text()), "n_layer": layers}))
        with pytest.raises(ValueError, match=f"do not fit their config.json; {kind}: "):
            from_gpt2(tmp_path)
    with pytest.raises(ValueError, match="GPT2Model has no head"):
        from_gpt2(gpt2().transformer)


def test_from_a_folder(tmp_path):
    theirs = gpt2()
    theirs.save_pretrained(tmp_path)
    idx = torch.randint(50, (3, 20))
    assert (from_gpt2(tmp_path)(idx)[0] - theirs(idx).logits).abs().max() < 1e-5
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin and no model.safetensors"):
        from_gpt2(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block": "rgpt"}, "block = 'rgpt': must be one of 'gpt'"),
        ({"norm": "rmsnorm"}, "norm = 'rmsnorm'"),
        ({"head_bias": True}, "head_bias = True"),
        ({"beta": 0.3}, "beta = 0.3"),
    ],
)
def test_what_gpt2_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        to_gpt2(LanguageModel(config(**{"block": "gpt", **fields})))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"activation_function": "silu"}, "activation_function = 'silu': must be one of"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"n_inner": 33}, "n_inner = 33: must be a multiple of n_embd = 32"),
    ],
)
def test_what_our_gpt_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        from_gpt2(gpt2(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"block": "gpt", "bias": True, "attention_bias": True},
        {"block": "rgpt_parallel", "attention_bias": True},
        {"feedforward": "ff1"},
        {"feedforward": "ff2w"},
        {"feedforward": "ff2"},
    ],
    ids=str,
)
def test_the_options_that_gpt2_needs_against_the_reference(fields):
    cfg = config(activation="gelu_tanh", **fields)
    model = randomised(cfg)
    w = weights(model)
    idx, targets = tokens(cfg)
    logits, loss = model(idx, targets)
    expected = reference.loss(cfg, w, idx, targets)
    assert relative(logits, reference.logits(cfg, w, idx)) < 1e-10
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("b_K"):  # shifts all scores of a query equally, which changes nothing
            assert parameter.grad.abs().max() < 1e-12
        else:
            assert relative(parameter.grad, w[name].grad) < 1e-9, name


def test_attention_biases_are_counted_start_at_zero_and_belong_to_the_baselines():
    cfg = config(block="rgpt")
    without = LanguageModel(cfg).parameter_counts()
    model = LanguageModel(dataclasses.replace(cfg, attention_bias=True))
    assert model.parameter_counts().groups["attention"] - without.groups["attention"] == 3 * 9
    for letter in "QKV":
        assert model.get_parameter(f"blocks.0.attention.b_{letter}").eq(0).all()
    with pytest.raises(ValueError, match="attention_bias = True: must be left alone: prelude = 0"):
        config(attention_bias=True)


@pytest.mark.parametrize(
    "named",
    ["adapter_model.bin", "pytorch_model.bin", "x.safetensors.index.json", "../x.safetensors", 3],
)
def test_no_pickle_by_any_name(tmp_path, named):
    """A configuration may name the file of its weights, and an index the files behind it."""
    gpt2().save_pretrained(tmp_path)
    torch.save({"a": torch.zeros(2)}, tmp_path / "adapter_model.bin")
    index = {"metadata": {}, "weight_map": {"a": "adapter_model.bin"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index))
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text()) | {"transformers_weights": named}
    config.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"config\.json: transformers_weights = .*never opened"):
        from_gpt2(tmp_path)


def test_no_pickle_of_an_adapter(tmp_path):
    gpt2().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "pytorch_model.bin")
    (tmp_path / "own").mkdir()
    named = {"base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "own" / "adapter_config.json").write_text(json.dumps(named))
    (tmp_path / "own" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="pickle files can run any code"):
        check_folder(tmp_path / "own")
    (tmp_path / "own" / "adapter_config.json").write_text("{}")
    (tmp_path / "own" / "adapter_model.safetensors").rename(tmp_path / "own" / "adapter_model.bin")
    with pytest.raises(ValueError, match="pickle files can run any code"):
        check_folder(tmp_path / "own")


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    gpt2().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match=f"{tmp_path}.*not a file of tensors"):
        from_gpt2(tmp_path)
