"""The authors' checkpoints, compared with a plain implementation of their classes."""

import pytest
import torch
import torch.nn.functional as F

from nrgpt import load_released
from nrgpt.interop.released import KINDS

V, N, D, H, T = 11, 13, 12, 3, 4
ENERGY = ("NRGPT_H_FF1", "NRGPT_H_FF2W", "NRGPT_H_FF2")


def released_state_dict(kind, *, strict=False, hidden=4 * D, dtype=torch.float32):
    """A random state dict with the keys and shapes of the authors' class."""
    shapes = {
        "token_embedding_table.weight": (V, D),
        "position_embedding_table.weight": (N, D),
        "ln_f.weight": (D,),
        "ln_f.bias": (D,),
        "lm_head.weight": (V, D),
        "lm_head.bias": (V,),
    }
    if kind in ENERGY:
        shapes |= {f"blocks.attn.heads.{h}.H.weight": (D, D) for h in range(H)}
        shapes |= {"blocks.ln.weight": (D,), "blocks.ln.bias": (D,)}
        shapes |= {"blocks.proj.weight": (D, D), "blocks.scale_ff": (1,)}
        layers = {
            "NRGPT_H_FF1": {0: (hidden, D)},
            "NRGPT_H_FF2W": {0: (hidden, D), 2: (D, hidden)},
            "NRGPT_H_FF2": {0: (D, D), 2: (hidden, D)},
        }[kind]
        for i, (rows, columns) in layers.items():
            shapes[f"blocks.ffwd.net.{i}.weight"] = (rows, columns)
            shapes[f"blocks.ffwd.net.{i}.bias"] = (rows,)
    else:
        for p in [f"blocks.{i}" for i in range(T)] if kind == "GPT" else ["blocks"]:
            for h in range(H):
                for part in ("key", "query", "value"):
                    shapes[f"{p}.sa.heads.{h}.{part}.weight"] = (D // H, D)
            shapes |= {f"{p}.sa.proj.weight": (D, D), f"{p}.sa.proj.bias": (D,)}
            shapes |= {f"{p}.ffwd.net.0.weight": (hidden, D), f"{p}.ffwd.net.0.bias": (hidden,)}
            shapes |= {f"{p}.ffwd.net.2.weight": (D, hidden), f"{p}.ffwd.net.2.bias": (D,)}
            for ln in ("ln1", "ln2"):
                shapes |= {f"{p}.{ln}.weight": (D,), f"{p}.{ln}.bias": (D,)}
    weights = {key: 0.3 * torch.randn(shape, dtype=dtype) for key, shape in shapes.items()}
    tril = torch.ones(N, N).tril(-1 if strict and kind in ENERGY else 0)
    heads = [key.rsplit(".", 2)[0] for key in weights if ".heads." in key]
    return weights | {f"{head}.tril": tril for head in heads} | {"pos_idx": torch.arange(N)}


def released_logits(kind, w, idx, strict):
    """What the authors' class computes."""

    def ln(x, name):
        return F.layer_norm(x, (D,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def softmax(scores, diagonal):
        seen = torch.ones(scores.shape[-2:]).tril(diagonal).bool()
        return torch.softmax(scores.masked_fill(~seen, -1e30), -1) * seen

    def energy_step(x):
        g = ln(x, "blocks.ln").requires_grad_()
        force = torch.zeros_like(x)
        for h in range(H):
            Hg = linear(g, f"blocks.attn.heads.{h}.H")
            force = force + softmax(g @ Hg.mT, -1 if strict else 0) @ Hg
        y = F.gelu(linear(g, "blocks.ffwd.net.0"))
        if kind == "NRGPT_H_FF2W":
            E = -(g * linear(y, "blocks.ffwd.net.2")).sum()
        elif kind == "NRGPT_H_FF2":
            E = -F.gelu(linear(y, "blocks.ffwd.net.2")).square().sum()
        else:
            E = -y.square().sum()
        force = force - w["blocks.scale_ff"] * torch.autograd.grad(E, g)[0]
        return (x + linear(force, "blocks.proj")).detach()

    def attention(g, p):
        out = []
        for h in range(H):
            k, q, v = (linear(g, f"{p}.sa.heads.{h}.{c}") for c in ("key", "query", "value"))
            out.append(softmax(q @ k.mT * k.shape[-1] ** -0.5, 0) @ v)
        return linear(torch.cat(out, -1), f"{p}.sa.proj")

    def feedforward(g, p):
        return linear(F.relu(linear(g, f"{p}.ffwd.net.0")), f"{p}.ffwd.net.2")

    x = (
        w["token_embedding_table.weight"][idx]
        + w["position_embedding_table.weight"][: idx.shape[1]]
    )
    for t in range(T):
        p = f"blocks.{t}" if kind == "GPT" else "blocks"
        if kind in ENERGY:
            x = energy_step(x)
        elif kind == "GPT_Rec_parallel":
            x = x + attention(ln(x, f"{p}.ln1"), p) + feedforward(ln(x, f"{p}.ln2"), p)
        else:
            x = x + attention(ln(x, f"{p}.ln1"), p)
            x = x + feedforward(ln(x, f"{p}.ln2"), p)
    return linear(ln(x, "ln_f"), "lm_head")


def test_the_number_of_heads_need_not_divide_the_width():
    w = released_state_dict("NRGPT_H_FF2W")
    w |= {key.replace(".2.", ".3."): v for key, v in w.items() if ".heads.2." in key}
    w |= {key.replace(".2.", ".4."): v for key, v in w.items() if ".heads.2." in key}
    assert load_released(w, steps=T).cfg.heads == 5


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_same_logits(kind, strict):
    idx = torch.randint(V, (3, 9))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        w = released_state_dict(kind, strict=strict, dtype=dtype)
        expected = released_logits(kind, w, idx, strict)
        model = load_released(w, kind, steps=T, strict_mask=strict)
        assert (model(idx)[0] - expected).abs().max() < tolerance * expected.abs().max()
        if kind in ENERGY:  # the mask can be read off the checkpoint
            model = load_released(w, kind, steps=T)
            assert model.cfg.mask == ("strict" if strict else "released")


def test_a_checkpoint_without_a_mask_has_the_diagonal():
    w = released_state_dict("NRGPT_H_FF1", strict=True)
    w = {key: value for key, value in w.items() if not key.endswith("tril")}
    assert load_released(w, steps=T).cfg.mask == "released"


@pytest.mark.parametrize("kind", ["NRGPT_H_FF1", "NRGPT_H_FF2W", "NRGPT_H_FF2", "GPT"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_kind_from_keys_and_prefixes(kind, prefix):
    w = released_state_dict(kind)
    prefixed = {prefix + key: value for key, value in w.items()}
    model = load_released(prefixed, steps=None if kind == "GPT" else T)
    assert model.cfg == load_released(w, kind, steps=T).cfg
    assert model.cfg.steps == T


def test_hidden_factor_is_read_off():
    w = released_state_dict("NRGPT_H_FF1", hidden=8 * D)
    assert load_released(w, steps=T).cfg.hidden_factor == 8
    w = released_state_dict("NRGPT_H_FF1", hidden=D + 1)
    with pytest.raises(ValueError, match="13 rows; must be a multiple of width = 12"):
        load_released(w, steps=T)


def test_what_does_not_fit_is_named():
    w = released_state_dict("NRGPT_H_FF2W")
    with pytest.raises(ValueError, match=r"steps = None: NRGPT_H_FF2W is recurrent"):
        load_released(w)
    with pytest.raises(ValueError, match=r"kind = 'NRGPT_H_FF2V'.*did you mean"):
        load_released(w, "NRGPT_H_FF2V", steps=T)
    with pytest.raises(ValueError, match=r"left over: blocks\.ffwd\.net\.2\.weight"):
        load_released(w, "NRGPT_H_FF1", steps=T)
    lacking = {key: value for key, value in w.items() if "proj" not in key}
    with pytest.raises(ValueError, match=r"missing: blocks\.proj\.weight; left over: nothing"):
        load_released(lacking, steps=T)
    with pytest.raises(ValueError, match=r"missing: nothing; left over: extra\.weight"):
        load_released(w | {"extra.weight": torch.zeros(3)}, steps=T)
    with pytest.raises(ValueError, match=r"proj\.weight: shape \(3, 3\) where .* \(12, 12\)"):
        load_released(w | {"blocks.proj.weight": torch.zeros(3, 3)}, steps=T)
    with pytest.raises(ValueError, match=r"fits none of .*left over: conv\.weight"):
        load_released({"conv.weight": torch.zeros(3)})
    headless = {key: value for key, value in w.items() if ".heads." not in key}
    with pytest.raises(ValueError, match=r"missing: blocks\.attn\.heads\.0\.H\.weight"):
        load_released(headless, "NRGPT_H_FF2W", steps=T)
    with pytest.raises(ValueError, match=r"missing: blocks\.0\.sa\.heads\.0\.query\.weight"):
        load_released(w, "GPT", steps=T)
    with pytest.raises(ValueError, match=r"token_embedding_table\.weight: shape \(3,\)"):
        load_released(w | {"token_embedding_table.weight": torch.zeros(3)}, steps=T)
    without_embedding = {key: value for key, value in w.items() if "token" not in key}
    with pytest.raises(ValueError, match=r"missing: token_embedding_table\.weight"):
        load_released(without_embedding, steps=T)


def test_ambiguous_keys_ask_for_the_kind():
    with pytest.raises(ValueError, match="GPT_Rec and GPT_Rec_parallel have the same keys"):
        load_released(released_state_dict("GPT_Rec"), steps=T)
    square = released_state_dict("NRGPT_H_FF2W", hidden=D)
    with pytest.raises(ValueError, match="NRGPT_H_FF2W and NRGPT_H_FF2 have the same keys"):
        load_released(square, steps=T)
    assert load_released(square, "NRGPT_H_FF2", steps=T).cfg.feedforward == "ff2"
    with pytest.raises(ValueError, match="steps = 3: this GPT has 4 layers"):
        load_released(released_state_dict("GPT"), steps=3)


ODD = ("blocks.attn.heads.100000000.H.weight", "blocks.attn.heads.07.H.x")


@pytest.mark.parametrize("key", ODD)
def test_numbers_in_names_are_bounded_by_what_is_there(key):
    w = released_state_dict("NRGPT_H_FF2W") | {key: torch.zeros(1)}
    with pytest.raises(ValueError, match="numbered from 0 without gaps"):
        load_released(w, steps=T)
    many = {f"blocks.{10**9}.sa.heads.0.key.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match="numbered from 0 without gaps"):
        load_released(released_state_dict("GPT") | many, "GPT")
