"""NRGPT and its baselines once more, as plainly as possible: the truth that the package must meet.

Nothing here comes from the package but the parameters' names. Energies are written as in the
paper, sums over tokens are loops, forces are autograd's, eta is an explicit matrix, and the norm
is written out. Slow, and easy to check by eye.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nrgpt import ModelConfig

Weights = dict[str, Tensor]


def norm(cfg: ModelConfig, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if cfg.norm == "none":
        return x
    gamma = w[f"{prefix}.gamma"]
    if cfg.norm == "rmsnorm":
        return gamma * x / torch.sqrt((x * x).mean(-1, keepdim=True) + cfg.norm_eps)
    y = x - x.mean(-1, keepdim=True)
    return (
        gamma * y / torch.sqrt((y * y).mean(-1, keepdim=True) + cfg.norm_eps) + w[f"{prefix}.delta"]
    )


def sigma(cfg: ModelConfig, z: Tensor) -> Tensor:
    if cfg.activation == "relu":
        return z.clamp(min=0)
    if cfg.activation == "gelu_tanh":
        return z * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return z * 0.5 * (1 + torch.erf(z / 2**0.5))


def attention(
    cfg: ModelConfig, w: Weights, own: Tensor, others: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """E^AT of every token, and what write weights of its own would write. ``own`` is the token
    being moved, ``others`` the ones it sees, ``start`` the g that drives it."""
    p = "blocks.0.energy.terms.attention"
    beta = cfg.beta or 1 / math.sqrt(cfg.width / cfg.heads)
    if cfg.coupling == "full":
        read, J = torch.eye(cfg.width, dtype=own.dtype), w[f"{p}.J"]
    else:
        read = w[f"{p}.W_Q"]
        J = w[f"{p}.W_K"].reshape(cfg.heads, -1, cfg.width).mT
    alpha = w.get(f"{p}.alpha", torch.ones(cfg.heads, dtype=own.dtype))
    if cfg.safeguard == "cone" and f"{p}.alpha" in w:
        alpha = torch.log1p(torch.exp(alpha))
    settled, energies, written = cfg.past == "settled", [], []
    for A in range(own.shape[1]):
        seen = [others[:, B] for B in range(A)]
        if cfg.mask == "inclusive":
            seen.append(others[:, A] if settled else own[:, A])
        if cfg.mask == "released":
            seen.append(others[:, A])
        E = torch.zeros(own.shape[0], dtype=own.dtype)
        moved = torch.zeros_like(own[:, A])
        if seen:
            q = own[:, A] @ read.T
            if cfg.drive and start is not None:
                q = q + start[:, A] @ w[f"{p}.W_drive"].T
            if cfg.coupling == "full":
                keys = torch.einsum("nbi,hij->bnhj", torch.stack(seen), J)
                scores = torch.einsum("bnhj,bj->bhn", keys, q)
            else:
                keys = torch.einsum("nbi,hiy->bnhy", torch.stack(seen), J)
                scores = torch.einsum("bnhy,bhy->bhn", keys, q.unflatten(-1, (cfg.heads, -1)))
            heads = torch.log(torch.exp(beta * scores).sum(-1)) / beta
            E = -(heads * alpha).sum(-1)
            if cfg.write == "free":
                values = (torch.stack(seen) @ w[f"{p}.W_V"].T).unflatten(-1, (cfg.heads, -1))
                means = torch.einsum("bhn,nbhy->bhy", torch.softmax(beta * scores, -1), values)
                moved = means.flatten(1) @ w[f"{p}.W_P"].T
        energies.append(E)
        written.append(moved)
    return torch.stack(energies, 1), torch.stack(written, 1)


def attention_energy(
    cfg: ModelConfig, w: Weights, own: Tensor, others: Tensor, start: Tensor | None = None
) -> Tensor:
    return attention(cfg, w, own, others, start)[0]


def feedforward_energy(
    cfg: ModelConfig, w: Weights, g: Tensor, start: Tensor | None = None
) -> Tensor:
    p = "blocks.0.energy.terms.feedforward"
    scale = w.get(f"{p}.feedforward_scale", torch.ones(1, dtype=g.dtype))

    def linear(x: Tensor, number: str) -> Tensor:
        z = x @ w[f"{p}.W{number}"].T + w.get(f"{p}.b{number}", torch.zeros(1, dtype=g.dtype))
        if cfg.drive and start is not None and number != "_2":
            z = z + start @ w[f"{p}.W_drive"].T
        return z

    match cfg.feedforward:
        case "ff1":
            E = -(sigma(cfg, linear(g, "")) ** 2).sum(-1)
        case "ff2w":
            E = -(g * linear(sigma(cfg, linear(g, "_1")), "_2")).sum(-1)
        case "ff2":
            E = -(sigma(cfg, linear(sigma(cfg, linear(g, "_1")), "_2")) ** 2).sum(-1)
        case "memory":
            z = linear(g, "")
            match cfg.potential:
                case "relu2":
                    values = z.clamp(min=0) ** 2 / 2
                case "gelu":
                    Phi = 0.5 * (1 + torch.erf(z / 2**0.5))
                    phi = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
                    values = ((z**2 - 1) * Phi + z * phi) / 2
                case "softplus":
                    values = torch.log1p(torch.exp(z))
                case "softplus2":
                    values = torch.log1p(torch.exp(z)) ** 2 / 2
            if f"{p}.units" in w:
                values = torch.log1p(torch.exp(w[f"{p}.units"])) * values
            E = -values.sum(-1)
    return scale * E


def energy(
    cfg: ModelConfig, w: Weights, own: Tensor, others: Tensor, term: str, start: Tensor | None
) -> Tensor:
    if term == "attention":
        return attention_energy(cfg, w, own, others, start)
    return feedforward_energy(cfg, w, own, start)


def gradient(
    cfg: ModelConfig, w: Weights, g: Tensor, term: str, start: Tensor | None = None
) -> Tensor:
    """dE_A/dg_A of every token and of one term, differentiable with respect to everything.
    ``start`` is the g that a settled past and the drive are made of."""
    own = g.clone() if g.requires_grad else g.clone().requires_grad_()
    others = start if start is not None and cfg.past == "settled" else g
    E = energy(cfg, w, own, others, term, start)
    return torch.autograd.grad(E.sum(), own, create_graph=True)[0]


def writing(cfg: ModelConfig, w: Weights, g: Tensor, term: str, start: Tensor | None) -> Tensor:
    """What write weights of a term's own add to x, before eta."""
    if term == "attention":
        others = start if start is not None and cfg.past == "settled" else g
        return attention(cfg, w, g, others, start)[1]
    p = "blocks.0.energy.terms.feedforward"
    z = g @ w[f"{p}.W"].T + w.get(f"{p}.b", torch.zeros(1, dtype=g.dtype))
    if cfg.drive and start is not None:
        z = z + start @ w[f"{p}.W_drive"].T
    return sigma(cfg, z) @ w[f"{p}.W_2"].T


def sequence_energy(cfg: ModelConfig, w: Weights, g: Tensor) -> Tensor:
    """E_A of every token of an Energy Transformer, all of which may move, (batch, tokens)."""
    p = "blocks.0.energy.terms.attention"
    beta = cfg.beta or 1 / math.sqrt(cfg.width / cfg.heads)
    alpha = w.get(f"{p}.alpha", torch.ones(cfg.heads, dtype=g.dtype))
    if cfg.safeguard == "cone" and f"{p}.alpha" in w:
        alpha = torch.log1p(torch.exp(alpha))
    if cfg.coupling == "full":
        J = w[f"{p}.J"]
    else:
        W_Q, W_K = (w[f"{p}.W_{c}"].unflatten(0, (cfg.heads, -1)) for c in "QK")
        J = W_K.mT @ W_Q
    energies = []
    for A in range(g.shape[1]):
        seen = {"others": set(range(g.shape[1])) - {A}, "all": range(g.shape[1])}
        E = torch.zeros(g.shape[0], dtype=g.dtype)
        if others := sorted(seen.get(cfg.sight, range(A))):
            scores = torch.einsum("bni,hij,bj->bhn", g[:, others], J, g[:, A])
            E = -(alpha * torch.log(torch.exp(beta * scores).sum(-1)) / beta).sum(-1)
        energies.append(E)
    return torch.stack(energies, 1) + feedforward_energy(cfg, w, g)


def et_step(cfg: ModelConfig, w: Weights, x: Tensor, t: int) -> Tensor:
    g = norm(cfg, w, "blocks.0.norm", x)
    g = g if g.requires_grad else g.clone().requires_grad_()
    slope = torch.autograd.grad(sequence_energy(cfg, w, g).sum(), g, create_graph=True)[0]
    return x - torch.einsum("bnij,bnj->bni", eta(cfg, w, t, x, "attention"), slope)


def eta(cfg: ModelConfig, w: Weights, t: int, x: Tensor, term: str) -> Tensor:
    """The inference rate as a matrix for every token, shape (batch, tokens, D, D)."""
    p = "blocks.0.rate"
    D = cfg.width
    eye = torch.eye(D, dtype=x.dtype)
    gamma = torch.ones(D, dtype=x.dtype) if cfg.norm == "none" else w["blocks.0.norm.gamma"]
    t = min(t, cfg.steps - 1)
    match cfg.rate:
        case "identity":
            matrix = eye
        case "scalar":
            matrix = w[f"{p}.log_c"].exp() * eye
        case "gamma":
            matrix = w[f"{p}.log_c"].exp() * gamma.diag()
        case "gamma_per_step":
            matrix = w[f"{p}.log_c"][t].exp() * gamma.diag()
        case "free":
            matrix = w[f"{p}.eta"]
        case "free_per_step":
            matrix = w[f"{p}.eta"][t]
        case "free_per_term":
            own = (w[f"{p}.eta_attention"], w[f"{p}.eta_feedforward"])
            names = ("attention", "feedforward")
            matrix = own[names.index(term)] if term in names else (own[0] + own[1]) / 2
        case "gains":
            own = (w[f"{p}.c_attention"][t], w[f"{p}.c_feedforward"][t])
            names = ("attention", "feedforward")
            matrix = (own[names.index(term)] if term in names else (own[0] + own[1]) / 2).diag()
        case "psd_skew":
            U, V = w[f"{p}.U"], w[f"{p}.V"]
            matrix = U.T @ U + V - V.T
        case "psd_skew_per_step":
            U, V = w[f"{p}.U"][t], w[f"{p}.V"][t]
            matrix = U.T @ U + V - V.T
        case "state":
            g = norm(cfg, w, "blocks.0.norm", x)
            M = torch.log1p(torch.exp(g @ w[f"{p}.W_M"].T + w[f"{p}.b_M"]))
            return torch.diag_embed(M) @ projector(cfg, x) @ gamma.diag()
    return matrix.expand(*x.shape[:2], D, D)


def projector(cfg: ModelConfig, x: Tensor) -> Tensor:
    """P_A = r Gamma^-1 dg/dx, written out."""
    D = cfg.width
    eye = torch.eye(D, dtype=x.dtype)
    if cfg.norm == "none":
        return eye.expand(*x.shape, D)
    mean = x.mean(-1, keepdim=True) if cfg.norm == "layernorm" else 0 * x
    y = x - mean
    u = y / torch.sqrt((y * y).mean(-1, keepdim=True) + cfg.norm_eps)
    P = eye - u[..., :, None] * u[..., None, :] / D
    return P - 1 / D if cfg.norm == "layernorm" else P


def nrgpt_step(
    cfg: ModelConfig, w: Weights, x: Tensor, t: int, start: Tensor | None = None
) -> Tensor:
    """``start``: the state that the steps started in."""
    g = norm(cfg, w, "blocks.0.norm", x)
    g_0 = None if start is None else norm(cfg, w, "blocks.0.norm", start)
    terms = ("attention", "feedforward")
    forces = [-gradient(cfg, w, g, term, g_0) for term in terms]
    pushes = forces
    if cfg.write == "free":
        pushes = [writing(cfg, w, g, term, g_0) for term in terms]
    y = x
    for term, push in zip(terms, pushes, strict=True):
        y = y + torch.einsum("bnij,bnj->bni", eta(cfg, w, t, x, term), push)
    return in_cone(cfg, w, x, y, forces[0] + forces[1]) if cfg.safeguard == "cone" else y


def in_cone(cfg: ModelConfig, w: Weights, x: Tensor, y: Tensor, force: Tensor) -> Tensor:
    """For concave energies, by angles. A last coordinate sqrt(D eps) makes the norm a projection to
    a sphere; the angle to the force may not grow."""

    def lifted(v: Tensor) -> Tensor:
        v = v - v.mean(-1, keepdim=True) if cfg.norm == "layernorm" else v
        return torch.cat([v, torch.full_like(v[..., :1], (cfg.width * cfg.norm_eps) ** 0.5)], -1)

    if cfg.norm == "none":
        short = ((x - y) * force).sum(-1, keepdim=True) / (force * force).sum(-1, keepdim=True)
        return y + torch.relu(short) * force
    u = lifted(w["blocks.0.norm.gamma"] * force)
    u = torch.cat([u[..., :-1], torch.zeros_like(u[..., :1])], -1)
    u = u / (u * u).sum(-1, keepdim=True).sqrt()
    a, b = lifted(x), lifted(y)
    angle = torch.acos((a * u).sum(-1, keepdim=True) / (a * a).sum(-1, keepdim=True).sqrt())
    across = b - (b * u).sum(-1, keepdim=True) * u
    needed = (across * across).sum(-1, keepdim=True).sqrt() / torch.tan(angle)
    return y + torch.relu(needed - (b * u).sum(-1, keepdim=True)) * u[..., :-1]


def transformer_step(
    cfg: ModelConfig, w: Weights, x: Tensor, t: int, prelude: int | None = None
) -> Tensor:
    p = f"blocks.{t if cfg.block == 'gpt' else 0}" if prelude is None else f"prelude.{prelude}"
    is_parallel = cfg.block == "rgpt_parallel"
    if prelude is not None:
        is_parallel = cfg.prelude_block == "parallel"

    def attention(g: Tensor) -> Tensor:
        q, k, v = (
            (
                g @ w[f"{p}.attention.W_{c}"].T + w.get(f"{p}.attention.b_{c}", 0)
                if f"{p}.attention.W_{c}" in w
                else g
            ).unflatten(-1, (cfg.heads, -1))
            for c in "QKV"
        )
        scores = torch.einsum("bahy,bchy->bhac", q, k) * (
            cfg.beta or 1 / math.sqrt(cfg.width / cfg.heads)
        )
        future = torch.ones(g.shape[1], g.shape[1]).triu(1).bool()
        weights = torch.softmax(scores.masked_fill(future, -math.inf), -1)
        out = torch.einsum("bhac,bchy->bahy", weights, v).flatten(-2)
        if cfg.values == "identity":
            return out
        return out @ w[f"{p}.attention.W_P"].T + w.get(f"{p}.attention.b_P", 0)

    def feedforward(g: Tensor) -> Tensor:
        f = f"{p}.feedforward"
        hidden = sigma(cfg, g @ w[f"{f}.W_1"].T + w.get(f"{f}.b_1", 0))
        return hidden @ w[f"{f}.W_2"].T + w.get(f"{f}.b_2", 0)

    if is_parallel:
        second = "norm_2" if cfg.separate_norms else "norm"
        return (
            x
            + attention(norm(cfg, w, f"{p}.norm", x))
            + feedforward(norm(cfg, w, f"{p}.{second}", x))
        )
    x = x + attention(norm(cfg, w, f"{p}.norm_1", x))
    return x + feedforward(norm(cfg, w, f"{p}.norm_2", x))


def ebt_states(cfg: ModelConfig, w: Weights, idx: Tensor) -> list[Tensor]:
    """What an Energy-Based Transformer says after each step, place by place, (batch, tokens, V)."""
    p, layers = "blocks.0", range(cfg.layers)
    beta = cfg.beta or 1 / math.sqrt(cfg.width / cfg.heads)

    def linear(x: Tensor, name: str, bias: str) -> Tensor:
        return x @ w[name].T + w.get(bias, 0)

    def layer(number: int, x: Tensor, before: list[Tensor]) -> Tensor:
        """One token, which sees the earlier ones ``before`` it, as they are here, and itself."""
        a, f = f"{p}.stack.{number}.attention", f"{p}.stack.{number}.feedforward"
        g = [norm(cfg, w, f"{p}.stack.{number}.norm_1", y) for y in [*before, x]]
        q, keys, values = (
            torch.stack([linear(y, f"{a}.W_{c}", f"{a}.b_{c}") for y in some], 1)
            for some, c in ((g[-1:], "Q"), (g, "K"), (g, "V"))
        )
        q, keys, values = (y.unflatten(-1, (cfg.heads, -1)) for y in (q, keys, values))
        weights = torch.softmax(beta * torch.einsum("bhy,bnhy->bhn", q[:, 0], keys), -1)
        mixed = torch.einsum("bhn,bnhy->bhy", weights, values).flatten(1)
        x = x + linear(mixed, f"{a}.W_P", f"{a}.b_P")
        g_2 = norm(cfg, w, f"{p}.stack.{number}.norm_2", x)
        return x + linear(sigma(cfg, linear(g_2, f"{f}.W_1", f"{f}.b_1")), f"{f}.W_2", f"{f}.b_2")

    observed: list[list[Tensor]] = [[] for _ in layers]
    said: list[list[Tensor]] = [[] for _ in range(cfg.steps)]
    for A in range(idx.shape[1]):
        x = w["tokens"][idx[:, A]] + w["positions"][A]
        for i in layers:
            y = layer(i, x, observed[i])
            observed[i].append(x)
            x = y
        v = torch.zeros(len(idx), cfg.vocab_size, dtype=x.dtype, requires_grad=True)
        for t in range(cfg.steps):
            h = torch.softmax(v, -1) @ w[f"{p}.candidates"] + w[f"{p}.places"][A]
            for i in layers:
                h = layer(i, h, observed[i])
            if cfg.norm != "none":
                y = h - h.mean(-1, keepdim=True) if cfg.norm == "layernorm" else h
                gamma, eps = w[f"{p}.norm.gamma"], cfg.norm_eps
                h = gamma * y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps)
                h = h + w.get(f"{p}.norm.delta", 0)
            slope = torch.autograd.grad((h @ w[f"{p}.w"]).sum(), v, create_graph=True)[0]
            v = v - w[f"{p}.log_c"].exp() * cfg.vocab_size * slope
            said[t].append(v)
    return [torch.stack(places, 1) for places in said]


def logits(cfg: ModelConfig, w: Weights, idx: Tensor, steps: int | None = None) -> Tensor:
    x = w["tokens"][idx] + w["positions"][: idx.shape[1]]
    if cfg.block == "nrgpt":
        for number in [*range(cfg.prelude)] * cfg.prelude_loops:
            if cfg.prelude_block == "shared":
                x = nrgpt_step(dataclasses.replace(cfg, safeguard="none"), w, x, 0)
            else:
                x = transformer_step(cfg, w, x, 0, number)
        if cfg.start == "sphere":
            x = x / (x * x).mean(-1, keepdim=True).sqrt()
    start = x
    for t in range(steps or cfg.steps):
        if cfg.block == "nrgpt":
            x = nrgpt_step(cfg, w, x, t, start)
        elif cfg.block == "et":
            x = et_step(cfg, w, x, t)
        else:
            x = transformer_step(cfg, w, x, t)
    head = w["tokens"] if cfg.tied else w["head"]
    return norm(cfg, w, "final_norm", x) @ head.T + w.get("head_bias", 0)


def loss(cfg: ModelConfig, w: Weights, idx: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits(cfg, w, idx).flatten(0, 1), targets.flatten())
