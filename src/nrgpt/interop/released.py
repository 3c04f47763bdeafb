"""The models the authors released: their configurations in our terms, and their checkpoints.

docs/deviations.md compares them with ours.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..check import check_choice
from ..language_model import LanguageModel
from ..model.config import ModelConfig

KINDS: dict[str, dict[str, Any]] = {
    "NRGPT_H_FF1": {"block": "nrgpt", "feedforward": "ff1"},
    "NRGPT_H_FF2W": {"block": "nrgpt", "feedforward": "ff2w"},
    "NRGPT_H_FF2": {"block": "nrgpt", "feedforward": "ff2"},
    "GPT": {"block": "gpt"},
    "GPT_Rec": {"block": "rgpt"},
    "GPT_Rec_parallel": {"block": "rgpt_parallel", "separate_norms": True},
}
"""The authors' classes as fields of ModelConfig."""


def released_config(kind: str, *, strict_mask: bool = False, **sizes: int) -> ModelConfig:
    """The ModelConfig that computes what the authors' class ``kind`` computes.

    ``sizes`` are vocab_size, context, width, heads, steps and hidden_factor. ``strict_mask``
    excludes the diagonal, as in their ListOps sweeps; it applies to the energy models only.
    """
    check_choice("kind", kind, KINDS)
    shared: dict[str, Any] = {"bias": True, "tied": False, "head_bias": True, **sizes}
    if not kind.startswith("NRGPT"):
        return ModelConfig(**KINDS[kind], **shared, activation="relu")
    return ModelConfig(
        **KINDS[kind],
        **shared,
        mask="strict" if strict_mask else "released",
        coupling="full",
        beta=1.0,
        learn_alpha=False,
        feedforward_scale=True,
        learn_gamma=False,
        rate="free",
        rate_init="random",
    )


def load_released(
    state_dict: Mapping[str, Tensor],
    kind: str | None = None,
    *,
    steps: int | None = None,
    strict_mask: bool | None = None,
) -> LanguageModel:
    """A LanguageModel with the weights and the logits of one of the authors' checkpoints.

    ``kind`` is the name of their class. It can be omitted if the keys determine it (GPT_Rec and
    GPT_Rec_parallel have the same keys). ``steps`` is their n_layer, and only needed for recurrent
    models. By default, ``strict_mask`` is read from the mask in the dict (``tril``).
    """
    theirs = {re.sub(r"^((module|_orig_mod)\.)+", "", key): w for key, w in state_dict.items()}
    kind = guess_kind(theirs) if kind is None else kind
    check_choice("kind", kind, KINDS)
    layers = count(theirs, r"^blocks\.(\d+)\.") if kind == "GPT" else 1
    heads = max(1, count(theirs, r"\.heads\.(\d+)\."))
    names = translation(kind, layers, heads)
    check_keys(theirs, names, kind)

    embedding = theirs["token_embedding_table.weight"]
    if embedding.dim() != 2:
        raise ValueError(f"token_embedding_table.weight: shape {tuple(embedding.shape)}, not 2-d")
    vocab_size, width = embedding.shape
    # net.0 has the hidden size, except in FF2, where a D x D layer comes first.
    widest = "2" if kind == "NRGPT_H_FF2" else "0"
    hidden_key = next(key for key in theirs if key.endswith(f"ffwd.net.{widest}.weight"))
    hidden = len(theirs[hidden_key])
    if hidden % width:
        raise ValueError(f"{hidden_key} has {hidden} rows; must be a multiple of width = {width}")
    if kind != "GPT" and steps is None:
        raise ValueError(f"steps = None: {kind} is recurrent; say how many steps (their n_layer)")
    if kind == "GPT" and steps not in (None, layers):
        raise ValueError(f"steps = {steps!r}: this GPT has {layers} layers")
    if strict_mask is None:
        mask = theirs.get("blocks.attn.heads.0.tril")
        strict_mask = mask is not None and bool(mask[0, 0] == 0)
    cfg = released_config(
        kind,
        strict_mask=strict_mask,
        vocab_size=vocab_size,
        context=len(theirs["position_embedding_table.weight"]),
        width=width,
        heads=heads,
        steps=layers if steps is None else steps,
        hidden_factor=hidden // width,
    )
    model = LanguageModel(cfg).to(embedding.dtype)
    ours = model.state_dict()
    for name, keys in names.items():
        tensors = [theirs[key] for key in keys]
        if name.endswith(".J"):  # their scores are g_A . H g_B = g_B^T H^T g_A, so J is H^T
            value = torch.stack([H.T for H in tensors])
        else:
            value = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        if value.shape != ours[name].shape:
            raise ValueError(
                f"{', '.join(keys)}: shape {tuple(value.shape)} where {kind} of this size has "
                f"{tuple(ours[name].shape)}"
            )
        ours[name] = value
    model.load_state_dict(ours)
    return model


def translation(kind: str, layers: int, heads: int) -> dict[str, list[str]]:
    """Our parameters, each with the authors' keys that it joins."""
    names = {
        "tokens": ["token_embedding_table.weight"],
        "positions": ["position_embedding_table.weight"],
    }
    modules = {("final_norm.gamma", "final_norm.delta"): "ln_f", ("head", "head_bias"): "lm_head"}
    if kind.startswith("NRGPT"):
        attention, feedforward = (
            f"blocks.0.energy.terms.{x}" for x in ("attention", "feedforward")
        )
        names |= {
            f"{attention}.J": [f"blocks.attn.heads.{h}.H.weight" for h in range(heads)],
            f"{feedforward}.feedforward_scale": ["blocks.scale_ff"],
            "blocks.0.rate.eta": ["blocks.proj.weight"],
        }
        modules["blocks.0.norm.gamma", "blocks.0.norm.delta"] = "blocks.ln"
        for ours, i in ({"": 0} if kind == "NRGPT_H_FF1" else {"_1": 0, "_2": 2}).items():
            modules[f"{feedforward}.W{ours}", f"{feedforward}.b{ours}"] = f"blocks.ffwd.net.{i}"
    else:
        first_norm = "norm" if kind == "GPT_Rec_parallel" else "norm_1"
        for i in range(max(layers, 1)):
            ours, theirs = f"blocks.{i}", f"blocks.{i}" if kind == "GPT" else "blocks"
            for letter, part in {"Q": "query", "K": "key", "V": "value"}.items():
                keys = [f"{theirs}.sa.heads.{h}.{part}.weight" for h in range(heads)]
                names[f"{ours}.attention.W_{letter}"] = keys
            modules |= {
                (f"{ours}.attention.W_P", f"{ours}.attention.b_P"): f"{theirs}.sa.proj",
                (f"{ours}.feedforward.W_1", f"{ours}.feedforward.b_1"): f"{theirs}.ffwd.net.0",
                (f"{ours}.feedforward.W_2", f"{ours}.feedforward.b_2"): f"{theirs}.ffwd.net.2",
                (f"{ours}.{first_norm}.gamma", f"{ours}.{first_norm}.delta"): f"{theirs}.ln1",
                (f"{ours}.norm_2.gamma", f"{ours}.norm_2.delta"): f"{theirs}.ln2",
            }
    for (weight, bias), module in modules.items():
        names |= {weight: [f"{module}.weight"], bias: [f"{module}.bias"]}
    return names


def check_keys(theirs: Mapping[str, Tensor], names: dict[str, list[str]], kind: str) -> None:
    wanted = [key for keys in names.values() for key in keys]
    missing = [key for key in wanted if key not in theirs]
    is_buffer = re.compile(r"^pos_idx$|\.tril$")
    left_over = [key for key in theirs if key not in set(wanted) and not is_buffer.search(key)]
    if missing or left_over:
        raise ValueError(
            f"this state dict does not fit {kind}; missing: {', '.join(missing) or 'nothing'}; "
            f"left over: {', '.join(left_over) or 'nothing'}"
        )


def guess_kind(theirs: Mapping[str, Tensor]) -> str:
    parts = {key.split(".")[1] for key in theirs if key.startswith("blocks.")}
    if "attn" in parts:
        first, second = (theirs.get(f"blocks.ffwd.net.{i}.weight") for i in (0, 2))
        if first is None or second is None:
            return "NRGPT_H_FF1"  # if that is wrong, check_keys will say so
        if first.shape == second.shape:
            raise ValueError(
                "kind = None: with a hidden size equal to the width, NRGPT_H_FF2W and NRGPT_H_FF2 "
                "have the same keys and shapes; say which it is"
            )
        return "NRGPT_H_FF2" if first.shape[0] == first.shape[1] else "NRGPT_H_FF2W"
    if "0" in parts:
        return "GPT"
    if "sa" in parts:
        raise ValueError(
            "kind = None: GPT_Rec and GPT_Rec_parallel have the same keys; say which it is"
        )
    raise ValueError(
        f"this state dict fits none of {', '.join(KINDS)}; missing: blocks.attn.* (energy models), "
        f"blocks.sa.* or blocks.0.* (baselines); left over: {', '.join(theirs) or 'nothing'}"
    )


def count(theirs: Mapping[str, Tensor], numbered: str) -> int:
    """How many numbers the pattern matches in the keys, which must be 0, 1, 2, ..."""
    found = {n for key in theirs for n in re.findall(numbered, key)}
    wanted = {str(n) for n in range(len(found))}
    if found != wanted:
        odd = min(found - wanted)[:20]
        raise ValueError(
            f"this state dict has {len(found)} parts {numbered!r}, but one of them is numbered "
            f"{odd}; they must be numbered from 0 without gaps"
        )
    return len(found)
