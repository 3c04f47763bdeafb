"""Hugging Face's GPT-2 as our GPT baseline, and back, with the same weights and the same logits.

GPT-2 keeps queries, keys and values in one matrix and stores its matrices transposed (Conv1D). Our
attention has no dropout on its weights, so ``attn_pdrop`` is lost.
"""

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..check import check, check_choice
from ..language_model import LanguageModel
from ..model.config import ModelConfig
from .weights import load_safetensors

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
FIELDS = {
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "width": "n_embd",
    "heads": "n_head",
    "steps": "n_layer",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "dropout": "resid_pdrop",
    "init_std": "initializer_range",
}
"""Fields of ModelConfig and GPT2Config that mean the same."""


def from_gpt2(source: "GPT2LMHeadModel | str | PathLike[str]") -> LanguageModel:
    """A LanguageModel with the weights of a GPT-2: a model, a folder or a name on the Hub."""
    gpt2: Any = source
    if isinstance(source, str | PathLike):
        from transformers import GPT2LMHeadModel

        gpt2, _ = load_safetensors(GPT2LMHeadModel.from_pretrained, source)
    if not hasattr(gpt2, "lm_head"):
        raise ValueError(f"{type(gpt2).__name__} has no head; give a GPT2LMHeadModel")
    cfg, theirs = our_config(gpt2.config), gpt2.state_dict()
    model = LanguageModel(cfg).to(gpt2.dtype)
    ours: dict[str, Tensor] = {}
    for key, names in translation(cfg).items():
        tensor = theirs[key].T if is_conv(key) else theirs[key]
        ours |= zip(names, tensor.chunk(len(names)), strict=True)
    model.load_state_dict(ours)
    return model.train(gpt2.training)


def to_gpt2(model: LanguageModel) -> "GPT2LMHeadModel":
    """A GPT2LMHeadModel with the weights of a ModelConfig(block="gpt"). Biases that our model does
    not have become 0."""
    from transformers import GPT2LMHeadModel

    gpt2: Any = GPT2LMHeadModel(their_config(model.cfg))
    gpt2.to(model.tokens.dtype)
    ours = model.state_dict()
    theirs = {key: torch.zeros_like(tensor) for key, tensor in gpt2.state_dict().items()}
    for key, names in translation(model.cfg).items():
        if names[0] in ours:
            tensor = torch.cat([ours[name] for name in names])
            theirs[key] = tensor.T if is_conv(key) else tensor
    if model.cfg.tied:
        theirs["lm_head.weight"] = ours["tokens"]
    gpt2.load_state_dict(theirs)
    return gpt2.train(model.training)


def our_config(theirs: Any) -> ModelConfig:
    check_choice("model_type", theirs.model_type, ["gpt2"])
    check_choice("activation_function", theirs.activation_function, ACTIVATIONS)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        value = getattr(theirs, name)
        check(not value, name, value, "False: our GPT does not support it")
    hidden = theirs.n_inner or 4 * theirs.n_embd
    is_multiple = hidden % theirs.n_embd == 0
    check(is_multiple, "n_inner", theirs.n_inner, f"a multiple of n_embd = {theirs.n_embd}")
    return ModelConfig(
        block="gpt",
        beta=None if theirs.scale_attn_weights else 1.0,
        activation=ACTIVATIONS[theirs.activation_function],
        hidden_factor=hidden // theirs.n_embd,
        bias=True,
        attention_bias=True,
        **{ours: getattr(theirs, name) for ours, name in FIELDS.items()},
    )


def their_config(ours: ModelConfig) -> Any:
    from transformers import GPT2Config

    check_choice("block", ours.block, ["gpt"])
    check_choice("norm", ours.norm, ["layernorm"])
    check(not ours.head_bias, "head_bias", ours.head_bias, "False: GPT-2's head has none")
    scales = {None: True, ours.head_width**-0.5: True, 1.0: False}
    must_be = "None or 1: GPT-2 scales scores by 1 / sqrt(width / heads) or not at all"
    check(ours.beta in scales, "beta", ours.beta, must_be)
    names = {name: theirs for theirs, name in reversed(ACTIVATIONS.items())}
    return GPT2Config(
        scale_attn_weights=scales[ours.beta],
        activation_function=names[ours.activation],
        n_inner=ours.hidden,
        embd_pdrop=ours.dropout,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        **{theirs: getattr(ours, name) for name, theirs in FIELDS.items()},
    )


def translation(cfg: ModelConfig) -> dict[str, list[str]]:
    """GPT-2's parameters, each with those of ours that it joins."""
    names = {
        "transformer.wte.weight": ["tokens"],
        "transformer.wpe.weight": ["positions"],
        "transformer.ln_f.weight": ["final_norm.gamma"],
        "transformer.ln_f.bias": ["final_norm.delta"],
    }
    if not cfg.tied:
        names["lm_head.weight"] = ["head"]
    for i in range(cfg.steps):
        for module, weights, biases in (
            ("ln_1", ["norm_1.gamma"], ["norm_1.delta"]),
            ("ln_2", ["norm_2.gamma"], ["norm_2.delta"]),
            ("attn.c_attn", *([f"attention.{x}_{c}" for c in "QKV"] for x in "Wb")),
            ("attn.c_proj", ["attention.W_P"], ["attention.b_P"]),
            ("mlp.c_fc", ["feedforward.W_1"], ["feedforward.b_1"]),
            ("mlp.c_proj", ["feedforward.W_2"], ["feedforward.b_2"]),
        ):
            for kind, ours in (("weight", weights), ("bias", biases)):
                names[f"transformer.h.{i}.{module}.{kind}"] = [f"blocks.{i}.{x}" for x in ours]
    return names


def is_conv(key: str) -> bool:
    """Whether this is a Conv1D's matrix, which is stored transposed."""
    return ".c_" in key and key.endswith(".weight")
