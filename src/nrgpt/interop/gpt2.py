"""Hugging Face's GPT-2 as our GPT baseline, and back: the same weights, the same logits.

Theirs keep queries, keys and values in one matrix, and matrices transposed (Conv1D). Our attention
knows no dropout of its weights, so ``attn_pdrop`` gets lost.
"""

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..check import check, check_choice
from ..language_model import LanguageModel
from ..model.config import ModelConfig
from .weights import check_folder

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
ATTENTION, FEEDFORWARD = "attn.c_attn", ("mlp.c_fc", "mlp.c_proj")


def from_gpt2(source: "GPT2LMHeadModel | str | PathLike[str]") -> LanguageModel:
    """A LanguageModel with the weights of a GPT-2: a model, a folder or a name on the Hub."""
    gpt2: Any = loaded(source) if isinstance(source, str | PathLike) else source
    if not hasattr(gpt2, "lm_head"):
        raise ValueError(f"{type(gpt2).__name__} has no head; give a GPT2LMHeadModel")
    cfg = our_config(gpt2.config)
    theirs = dict(gpt2.state_dict())
    model = LanguageModel(cfg).to(theirs["transformer.wte.weight"].dtype)
    model.load_state_dict(ours_of(theirs, cfg))
    return model.train(gpt2.training)


def loaded(source: "str | PathLike[str]") -> Any:
    from transformers import GPT2LMHeadModel

    check_folder(source)
    both: Any = GPT2LMHeadModel.from_pretrained(
        source, use_safetensors=True, output_loading_info=True
    )
    gpt2, found = both
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:  # transformers would go on with random weights, or without some of these
        raise ValueError(f"{source}: the weights do not fit the config: {wrong}")
    return gpt2


def to_gpt2(model: LanguageModel) -> "GPT2LMHeadModel":
    """A GPT2LMHeadModel with the weights of a ModelConfig(block="gpt"); biases that ours does
    without are 0."""
    from transformers import GPT2LMHeadModel

    gpt2: Any = GPT2LMHeadModel(their_config(model.cfg))
    gpt2.to(model.tokens.dtype)
    gpt2.load_state_dict(theirs_of(model.state_dict(), gpt2.state_dict(), model.cfg))
    return gpt2.train(model.training)


def our_config(theirs: Any) -> ModelConfig:
    check_choice("model_type", theirs.model_type, ["gpt2"])
    check_choice("activation_function", theirs.activation_function, ACTIVATIONS)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        value = getattr(theirs, name)
        check(not value, name, value, "False: our GPT has no such thing")
    hidden = theirs.n_inner or 4 * theirs.n_embd
    is_multiple = hidden % theirs.n_embd == 0
    check(is_multiple, "n_inner", theirs.n_inner, f"a multiple of n_embd = {theirs.n_embd}")
    return ModelConfig(
        block="gpt",
        vocab_size=theirs.vocab_size,
        context=theirs.n_positions,
        width=theirs.n_embd,
        heads=theirs.n_head,
        steps=theirs.n_layer,
        beta=None if theirs.scale_attn_weights else 1.0,
        activation=ACTIVATIONS[theirs.activation_function],
        hidden_factor=hidden // theirs.n_embd,
        bias=True,
        attention_bias=True,
        norm_eps=theirs.layer_norm_epsilon,
        tied=theirs.tie_word_embeddings,
        dropout=theirs.resid_pdrop,
        init_std=theirs.initializer_range,
    )


def their_config(ours: ModelConfig) -> Any:
    from transformers import GPT2Config

    check_choice("block", ours.block, ["gpt"])
    check_choice("norm", ours.norm, ["layernorm"])
    check(not ours.head_bias, "head_bias", ours.head_bias, "False: GPT-2's head has none")
    scales = {None: True, ours.head_width**-0.5: True, 1.0: False}
    is_known = ours.beta in scales
    check(
        is_known, "beta", ours.beta, "None or 1: GPT-2's scores are scaled by sqrt(width / heads)"
    )
    names = {name: theirs for theirs, name in reversed(ACTIVATIONS.items())}
    return GPT2Config(
        vocab_size=ours.vocab_size,
        n_positions=ours.context,
        n_embd=ours.width,
        n_head=ours.heads,
        n_layer=ours.steps,
        scale_attn_weights=scales[ours.beta],
        activation_function=names[ours.activation],
        n_inner=ours.hidden,
        layer_norm_epsilon=ours.norm_eps,
        tie_word_embeddings=ours.tied,
        resid_pdrop=ours.dropout,
        embd_pdrop=ours.dropout,
        attn_pdrop=0.0,
        initializer_range=ours.init_std,
        bos_token_id=None,
        eos_token_id=None,
    )


def single_names(cfg: ModelConfig) -> dict[str, tuple[str, bool]]:
    """Our name of each tensor that is one in both, theirs, and whether theirs is transposed."""
    names = {
        "tokens": ("transformer.wte.weight", False),
        "positions": ("transformer.wpe.weight", False),
        "final_norm.gamma": ("transformer.ln_f.weight", False),
        "final_norm.delta": ("transformer.ln_f.bias", False),
    }
    if not cfg.tied:
        names["head"] = ("lm_head.weight", False)
    for i in range(cfg.steps):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for n in (1, 2):
            names[f"{ours}.norm_{n}.gamma"] = (f"{theirs}.ln_{n}.weight", False)
            names[f"{ours}.norm_{n}.delta"] = (f"{theirs}.ln_{n}.bias", False)
            names[f"{ours}.feedforward.W_{n}"] = (f"{theirs}.{FEEDFORWARD[n - 1]}.weight", True)
            names[f"{ours}.feedforward.b_{n}"] = (f"{theirs}.{FEEDFORWARD[n - 1]}.bias", False)
        names[f"{ours}.attention.W_P"] = (f"{theirs}.attn.c_proj.weight", True)
        names[f"{ours}.attention.b_P"] = (f"{theirs}.attn.c_proj.bias", False)
    return names


def ours_of(theirs: dict[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    ours = {
        name: theirs[key].T if transposed else theirs[key]
        for name, (key, transposed) in single_names(cfg).items()
    }
    for i in range(cfg.steps):
        key, place = f"transformer.h.{i}.{ATTENTION}", f"blocks.{i}.attention"
        weights = theirs[f"{key}.weight"].T.chunk(3)
        biases = theirs[f"{key}.bias"].chunk(3)
        for letter, W, b in zip("QKV", weights, biases, strict=True):
            ours |= {f"{place}.W_{letter}": W, f"{place}.b_{letter}": b}
    return ours


def theirs_of(
    ours: dict[str, Tensor], like: dict[str, Tensor], cfg: ModelConfig
) -> dict[str, Tensor]:
    """``like`` has the names and shapes; what ours lacks are biases."""
    theirs = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    for name, (key, transposed) in single_names(cfg).items():
        if name in ours:
            theirs[key] = ours[name].T if transposed else ours[name]
    if cfg.tied:
        theirs["lm_head.weight"] = ours["tokens"]
    for i in range(cfg.steps):
        key, place = f"transformer.h.{i}.{ATTENTION}", f"blocks.{i}.attention"
        theirs[f"{key}.weight"] = torch.cat([ours[f"{place}.W_{c}"] for c in "QKV"]).T
        if cfg.attention_bias:
            theirs[f"{key}.bias"] = torch.cat([ours[f"{place}.b_{c}"] for c in "QKV"])
    return theirs
