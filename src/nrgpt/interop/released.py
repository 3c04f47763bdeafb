"""The authors' released models: their configurations in our terms, and their checkpoints.

Their energy models keep the diagonal of the attention mask unless told otherwise, leave scores
unscaled, have one full D x D matrix per head, a LayerNorm with gamma frozen at 1, one free eta for
all steps and a factor before the feed-forward energy. Their baselines use ReLU and, in parallel
blocks, two norms. All have an untied head with a bias. docs/deviations.md compares these with ours.
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
"""The authors' classes, and what ModelConfig calls them."""


def released_config(kind: str, *, strict_mask: bool = False, **sizes: int) -> ModelConfig:
    """The ModelConfig that computes what the authors' class ``kind`` computes.

    ``sizes``: vocab_size, context, width, heads, steps, hidden_factor. ``strict_mask`` excludes
    the diagonal, as their ListOps sweeps do; it concerns the energy models.
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
    """A LanguageModel with the weights, and the logits, of one of the authors' checkpoints.

    ``kind`` is the name of their class; it may be left out where the keys decide it (GPT_Rec and
    GPT_Rec_parallel have the same keys). ``steps`` is their n_layer, which only GPT's keys tell.
    ``strict_mask`` may be left out: their mask is in the dict, as ``tril``.
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
    # The hidden size stands in the shape of net.0, except where a D x D layer comes first.
    widest = "2" if kind == "NRGPT_H_FF2" else "0"
    hidden_key = next(key for key in theirs if key.endswith(f"ffwd.net.{widest}.weight"))
    hidden = len(theirs[hidden_key])
    if hidden % width:
        raise ValueError(f"{hidden_key} has {hidden} rows; must be a multiple of width = {width}")
    cfg = released_config(
        kind,
        strict_mask=is_strict(theirs) if strict_mask is None else strict_mask,
        vocab_size=vocab_size,
        context=len(theirs["position_embedding_table.weight"]),
        width=width,
        heads=heads,
        steps=number_of_steps(kind, steps, layers),
        hidden_factor=hidden // width,
    )
    model = LanguageModel(cfg).to(embedding.dtype)
    ours = model.state_dict()
    for name, keys in names.items():
        value = join(name, [theirs[key] for key in keys])
        if value.shape != ours[name].shape:
            raise ValueError(
                f"{', '.join(keys)}: shape {tuple(value.shape)} where {kind} of this size has "
                f"{tuple(ours[name].shape)}"
            )
        ours[name] = value
    model.load_state_dict(ours)
    return model


def translation(kind: str, layers: int, heads: int) -> dict[str, list[str]]:
    """Our parameters' names, each with the authors' keys that it is joined from."""
    single = {
        "tokens": "token_embedding_table.weight",
        "positions": "position_embedding_table.weight",
        "final_norm.gamma": "ln_f.weight",
        "final_norm.delta": "ln_f.bias",
        "head": "lm_head.weight",
        "head_bias": "lm_head.bias",
    }
    joined = {}
    if kind.startswith("NRGPT"):
        terms = "blocks.0.energy.terms"
        joined[f"{terms}.attention.J"] = [f"blocks.attn.heads.{h}.H.weight" for h in range(heads)]
        single |= {
            f"{terms}.feedforward.feedforward_scale": "blocks.scale_ff",
            "blocks.0.norm.gamma": "blocks.ln.weight",
            "blocks.0.norm.delta": "blocks.ln.bias",
            "blocks.0.rate.eta": "blocks.proj.weight",
        }
        numbers = {"": 0} if kind == "NRGPT_H_FF1" else {"_1": 0, "_2": 2}
        for ours, number in numbers.items():
            single[f"{terms}.feedforward.W{ours}"] = f"blocks.ffwd.net.{number}.weight"
            single[f"{terms}.feedforward.b{ours}"] = f"blocks.ffwd.net.{number}.bias"
        return joined | {ours: [key] for ours, key in single.items()}

    first_norm = "norm" if kind == "GPT_Rec_parallel" else "norm_1"
    for i in range(max(layers, 1)):
        ours, theirs = f"blocks.{i}", f"blocks.{i}" if kind == "GPT" else "blocks"
        for letter, part in {"Q": "query", "K": "key", "V": "value"}.items():
            keys = [f"{theirs}.sa.heads.{h}.{part}.weight" for h in range(heads)]
            joined[f"{ours}.attention.W_{letter}"] = keys
        single |= {
            f"{ours}.attention.W_P": f"{theirs}.sa.proj.weight",
            f"{ours}.attention.b_P": f"{theirs}.sa.proj.bias",
            f"{ours}.feedforward.W_1": f"{theirs}.ffwd.net.0.weight",
            f"{ours}.feedforward.b_1": f"{theirs}.ffwd.net.0.bias",
            f"{ours}.feedforward.W_2": f"{theirs}.ffwd.net.2.weight",
            f"{ours}.feedforward.b_2": f"{theirs}.ffwd.net.2.bias",
            f"{ours}.{first_norm}.gamma": f"{theirs}.ln1.weight",
            f"{ours}.{first_norm}.delta": f"{theirs}.ln1.bias",
            f"{ours}.norm_2.gamma": f"{theirs}.ln2.weight",
            f"{ours}.norm_2.delta": f"{theirs}.ln2.bias",
        }
    return joined | {ours: [key] for ours, key in single.items()}


def join(name: str, tensors: list[Tensor]) -> Tensor:
    """One parameter of ours from the tensors of theirs."""
    if name.endswith(".J"):
        # Their scores are g_A . H g_B = g_B^T H^T g_A, so J is H transposed.
        return torch.stack([H.T for H in tensors])
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


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
    def has(prefix: str) -> bool:
        return any(key.startswith(prefix) for key in theirs)

    if has("blocks.attn."):
        if not has("blocks.ffwd.net.2."):
            return "NRGPT_H_FF1"
        first, second = (theirs.get(f"blocks.ffwd.net.{i}.weight") for i in (0, 2))
        if first is None or second is None:
            return "NRGPT_H_FF2W"  # broken either way: check_keys will say what is missing
        if first.shape == second.shape:
            raise ValueError(
                "kind = None: with a hidden size equal to the width, NRGPT_H_FF2W and NRGPT_H_FF2 "
                "have the same keys and shapes; say which it is"
            )
        return "NRGPT_H_FF2" if first.shape[0] == first.shape[1] else "NRGPT_H_FF2W"
    if has("blocks.0."):
        return "GPT"
    if has("blocks.sa."):
        raise ValueError(
            "kind = None: GPT_Rec and GPT_Rec_parallel have the same keys; say which it is"
        )
    raise ValueError(
        f"this state dict fits none of {', '.join(KINDS)}; missing: blocks.attn.* (energy models), "
        f"blocks.sa.* or blocks.0.* (baselines); left over: {', '.join(theirs) or 'nothing'}"
    )


def count(theirs: Mapping[str, Tensor], numbered: str) -> int:
    """One more than the largest number that the pattern finds in the keys."""
    return 1 + max((int(n) for key in theirs for n in re.findall(numbered, key)), default=-1)


def number_of_steps(kind: str, steps: int | None, layers: int) -> int:
    if kind != "GPT" and steps is None:
        raise ValueError(f"steps = None: {kind} is recurrent; say how many steps (their n_layer)")
    if kind == "GPT" and steps not in (None, layers):
        raise ValueError(f"steps = {steps!r}: this GPT has {layers} layers")
    return layers if steps is None else steps


def is_strict(theirs: Mapping[str, Tensor]) -> bool:
    """Whether their mask excludes the diagonal; without a mask in the dict, their default: no."""
    mask = theirs.get("blocks.attn.heads.0.tril")
    return mask is not None and bool(mask[0, 0] == 0)
