"""Probes of descent: safeguarded (cone) and settled recurrent transformers on text, one at a time.

    python experiments/descent/probe.py --data gpu_data --out results.jsonl cone=true steps=12 ...

Self-contained on purpose: nothing of the package's models is used. A run trains one model, then
writes one JSON line of what was measured.

**Energy of a token** with g = n(x), keys k_B and values v_B of tokens it sees, all standing still:

    E(g) = - sum_h (alpha_h / beta) log(s + sum_B exp(beta q_h . k_hB)) - sum_j w_j phi(h_j) - c . g
    q = W_Q g + (drive),  h = W_1 g + (drive),   alpha, w >= 0 (softplus), phi convex

q and h are affine in g, so E is concave in g. s = 1 where the mask is strict: a zero key with a
zero value that everybody sees (a *sink*). A log-sum-exp with one more affine term, 0, is as convex
as before; the first token has a softmax, no energy and no force of attention without a special
case, and (sink, tokens 0..N-2) against N queries is an ordinary causal N x N attention, so that
lengths stay multiples of 128. With a settled past the token's own key is made by the prelude and
stands still too: the mask may be inclusive (B <= A), E stays concave, no sink is needed (s = 0).
Force: f = -dE/dg = sum_h alpha_h W_Qh^T sum_B p_B k_B + W_1^T (w phi'(h)) + c. Attention is called
with K = V = [k | v] and q padded by zeros: one softmax gives sum p k (for f) and sum p v (to move).

**Cone.** E(g') <= E(g) - f . (g' - g). With n(x) = x sqrt(D) / sqrt(|x|^2 + D eps), u = f / |f|:
u . n(x) = sqrt(D) A / sqrt(A^2 + B^2), A = u . x, B^2 = |x - A u|^2 + D eps, increasing in A / B.
So x' = y + push u with push = max(0, (A/B)_x B_y - A_y) is exact, eps included: a push along u
leaves B_y as it is. On the sphere (|x| set to sqrt(D) after each step) g = x and eps = 0.
Gradients: B >= sqrt(D eps) > 0 (on the sphere clamped at 1e-6 of the radius, where the cosine is 1
to 1e-12); |f| = 0 gives u = 0, push = 0 and relu's gradient 0; x parallel to f has a large but
finite cot, at most |x| / sqrt(D eps).
Rounding: when the cone acts f . (g' - g) is 0, and E falls by the curvature only; ``nudge`` asks
for 1e-6 more than A/B so that the last bits of fp32 do not decide.

What a cone costs: relu^2 has u = W_1^T (w relu(W_1 g)), of which a part is about lambda g ("stay");
moving away from g must then be paid for by the rest of u. Scaling all of E changes nothing, so what
counts is how much of E is hidden layer (``units``) and how much attention. A larger start
(``embed_norm``) makes the first move smaller against x, gains may depend on the step (E may not).
``energy_rate`` lets the energy's own weights (units, alpha, field) learn faster than the rest: as
softplus of a parameter under AdamW they hardly leave where they start in 1,000 updates.
``readout`` parts what a state says from where the energy lets it go. ``field`` may become a clock
(all states wander from -c to c, and everything else is free): how much of the fall is the field's
is measured.

Arrival. Writes that add up make |x| grow, and the direction of x settles as 1/t at best. With a
``leak`` the state forgets, x + leak (start - x) + writes, and a fixed point is start + writes /
leak, approached geometrically where the writes contract. The cone does not mind: y may be anything.
"""

import argparse
import dataclasses
import fcntl
import functools
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5
TINY = 1e-30


@dataclasses.dataclass
class Config:
    name: str = "probe"
    # sizes
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50_304
    steps: int = 12  # 0: the prelude alone (GPT: prelude=12, steps=0)
    prelude: int = 0
    loops: int = 1  # times the prelude's layers are gone through
    prelude_parallel: bool = False
    hidden: float = 4  # hidden units of a step, in widths
    share: bool = False  # the prelude is made of the steps' own weights (prelude rounds of them)
    # energy
    cone: bool = False
    settled: bool = False
    strict: bool = False
    act: str = "gelu"  # what a step's hidden layer writes: gelu, relu2
    potential: str = "relu2"  # phi: relu2 (relu^2/2), softplus
    units: float = 1.0  # where w starts
    alpha: float = 1.0
    wide_query: bool = False  # values in the energy: queries meet [k | v], not k alone
    field: bool = False  # c . g
    energy_rate: float = 1.0  # learning rate of units, alpha and field, in rates of the rest
    margin: float = 0.0  # share of 1 - cos that a step must take away
    nudge: float = 1e-6
    detach: bool = False  # no gradient through the force
    # moves
    embed_std: float = 0.02
    embed_norm: bool = False  # embeddings to the sphere
    start_norm: bool = False  # what the steps start from to the sphere
    sphere: bool = False  # every state to the sphere
    gains: str = "none"  # none, scalar, vector: of a step's two writes, learned
    gain_init: float = 1.0
    gain_power: float = 0.0  # gain of step t starts at gain_init / (1 + t)^power
    force_gain: bool = False  # a learned move along the force itself
    momentum: bool = False  # learned, per step
    inject: str = "none"  # none, state (vector gain x start), drive (W n(start) in q and h)
    leak: float = 0.0  # share of x (a vector, learned from here) that gives way to the start
    readout: bool = False  # a matrix between the last state and the token table
    writes: int = 1  # sets of write weights, shared out over the steps
    kv_gain: bool = False  # gamma for what a settled past's keys and values are read from
    beyond: float = 0.5  # gains after step ``steps`` fall by this factor each step
    # training
    updates: int = 1000
    batch: int = 16
    lr: float = 3e-3
    muon_lr: float = 0.02
    decay: float = 0.1
    warmup: int = 100
    final: float = 0.1
    depth: tuple[int, int] | None = None  # steps drawn anew for each update
    exits: float = 0.0  # share of tokens whose loss is read at an earlier step drawn for each
    exit_from: int = 2
    noise: float = 0.0  # in the start, in units of its size
    seed: int = 0
    precision: str = "bf16"
    compile: bool = True
    # measuring
    windows: int = 288
    part: int = 96
    pairs: int = 1_000_000
    speed: int = 0  # updates timed while the others wait


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def to_sphere(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp_min(1e-12))


def cone(x: Tensor, y: Tensor, f: Tensor, slack: float, margin: float, nudge: float):
    """The least push along f that brings y into the cone of x, and its length."""
    size = f.square().sum(-1, keepdim=True)
    # A force below 1e-15 counts as none: what it could raise is below rounding.
    u = torch.where(size > TINY, f * torch.rsqrt(size.clamp_min(TINY)), 0)
    floor = 1e-12 * x.shape[-1]
    a_x, a_y = (x * u).sum(-1, keepdim=True), (y * u).sum(-1, keepdim=True)
    b_x = ((x - a_x * u).square().sum(-1, keepdim=True) + slack).clamp_min(floor).sqrt()
    b_y = ((y - a_y * u).square().sum(-1, keepdim=True) + slack).clamp_min(floor).sqrt()
    cot = a_x / b_x
    if margin:  # 1 - cos' = (1 - m)(1 - cos)
        rest = (1 - margin) * (1 - cot * torch.rsqrt(1 + cot.square()))
        cot = (1 - rest) * torch.rsqrt((rest * (2 - rest)).clamp_min(1e-12))
    push = F.relu((cot + nudge) * b_y - a_y)
    return y + push * u, push


def sdpa(q: Tensor, kv: Tensor, strict: bool, need_keys: bool, scale: float) -> Tensor:
    """sum_B p_B [k_B | v_B] (without keys: v_B) of shape (batch, heads, tokens, size)."""
    size = kv.shape[-1] // 2
    if strict:
        kv = F.pad(kv[..., :-1, :], (0, 0, 1, 0))
    if need_keys:
        q = F.pad(q, (0, kv.shape[-1] - q.shape[-1]))
        return F.scaled_dot_product_attention(q, kv, kv, is_causal=True, scale=scale)
    k, v = kv[..., : q.shape[-1]], kv[..., size:]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def scores(q: Tensor, kv: Tensor, strict: bool, scale: float) -> Tensor:
    k = F.pad(kv[..., :-1, :], (0, 0, 1, 0)) if strict else kv
    s = scale * (q @ k[..., : q.shape[-1]].mT)
    return s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -math.inf)


def exact(q: Tensor, kv: Tensor, strict: bool, need_keys: bool, scale: float) -> Tensor:
    """The same, scores written down: what is measured is made of the same numbers as energies."""
    p = scores(q, kv, strict, scale).softmax(-1)
    k = F.pad(kv[..., :-1, :], (0, 0, 1, 0)) if strict else kv
    return p @ (k if need_keys else k[..., k.shape[-1] // 2 :])


def layer(x, W_QKV, W_P, W_1, W_2, heads: int, parallel: bool) -> Tensor:
    g = norm(x)
    q, k, v = F.linear(g, W_QKV).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    moved = F.linear(out.transpose(1, 2).flatten(-2), W_P)
    if not parallel:
        x, moved = x + moved, 0
        g = norm(x)
    return x + (moved + F.linear(F.gelu(F.linear(g, W_1)), W_2))


def nll(x: Tensor, head: Tensor, readout: Tensor | None, targets: Tensor) -> Tensor:
    g = norm(x) if readout is None else F.linear(norm(x), readout)
    logits = F.linear(g, head).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)


def phi(h: Tensor, kind: str) -> Tensor:
    return F.softplus(h) if kind == "softplus" else 0.5 * F.relu(h).square()


def slope(h: Tensor, kind: str) -> Tensor:
    return torch.sigmoid(h) if kind == "softplus" else F.relu(h)


class Weights(nn.Module):
    """W_Q, W_K, W_V, W_P, W_1, W_2 of a layer, or of a step with several sets of writes."""

    def __init__(self, width: int, queries: int, hidden: int, writes: int | None = None):
        super().__init__()
        several = () if writes is None else (writes,)
        self.W_Q = blank(queries, width)
        self.W_K, self.W_V = blank(width, width), blank(width, width)
        self.W_1 = blank(hidden, width)
        self.W_P, self.W_2 = blank(*several, width, width), blank(*several, width, hidden)


def blank(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * std)


def inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))


class Model(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        D, hidden = c.width, int(c.hidden * c.width)
        self.c, self.D, self.hidden = c, D, hidden
        self.size = D // c.heads  # of a head's key, and of its value
        self.queries = 2 * D if c.wide_query else D
        self.scale = (self.queries // c.heads) ** -0.5
        self.tokens = blank(c.vocabulary, D, std=c.embed_std)
        self.positions = blank(c.context, D, std=c.embed_std)
        self.W_readout = nn.Parameter(torch.eye(D)) if c.readout else None
        own = 0 if c.share else c.prelude
        self.layers = nn.ModuleList(Weights(D, D, 4 * D) for _ in range(own))
        self.layer, self.nll = layer, nll
        self.compiled = self.step
        if not c.steps:
            return
        self.block = Weights(D, self.queries, hidden, c.writes)
        self.units = nn.Parameter(torch.full((hidden,), inverse_softplus(c.units)))
        self.alpha = nn.Parameter(torch.full((c.heads, 1, 1), inverse_softplus(c.alpha)))
        self.field = nn.Parameter(torch.zeros(D)) if c.field else None
        self.kv_gamma = nn.Parameter(torch.ones(D)) if c.kv_gain else None
        self.W_drive = blank(self.queries + hidden, D) if c.inject == "drive" else None
        leak = torch.full((D,), math.log(c.leak / (1 - c.leak)) if c.leak else 0.0)
        self.leak = nn.Parameter(leak) if c.leak else None
        wide = D if c.gains == "vector" else 1
        start = c.gain_init / torch.arange(1.0, c.steps + 1)[:, None, None] ** c.gain_power
        # Of attention's and the hidden layer's writes; of force, momentum and injection.
        self.gains = nn.Parameter(start.repeat(1, 2, wide), requires_grad=c.gains != "none")
        extra = c.force_gain or c.momentum or c.inject == "state"
        self.extras = nn.Parameter(torch.zeros(c.steps, 3, 1), requires_grad=extra)

    def schedule(self, t: int, beyond: float) -> Tensor:
        """Gains of step t; after the trained steps those of the last one, smaller and smaller."""
        last = min(t, self.c.steps - 1)
        gains = torch.cat([self.gains[last], self.extras[last].expand(-1, self.gains.shape[-1])])
        return gains * beyond ** (t - last)

    def split(self, z: Tensor) -> Tensor:
        return z.unflatten(-1, (self.c.heads, -1)).transpose(1, 2)

    def prepare(self) -> dict[str, Tensor]:
        """The steps' matrices joined, once for all steps."""
        b = self.block
        kv = torch.cat(
            [b.W_K.unflatten(0, (self.c.heads, -1)), b.W_V.unflatten(0, (self.c.heads, -1))], 1
        )
        W = {
            "kv": kv.flatten(0, 1),
            "units": F.softplus(self.units),
            "alpha": F.softplus(self.alpha),
        }
        if self.leak is not None:
            W["leak"] = self.leak.sigmoid()
        W["read"] = torch.cat([b.W_Q, b.W_1] if self.c.settled else [b.W_Q, b.W_1, W["kv"]])
        return W

    def begin(self, tokens: Tensor):
        """The state that steps start from, a settled past's keys and values, and the drive."""
        c = self.c
        x = F.embedding(tokens, self.tokens) + self.positions[: tokens.shape[1]]
        if c.embed_norm:
            x = to_sphere(x)
        if c.share:
            b = self.block
            shared = torch.cat([b.W_Q, b.W_K, b.W_V])
            for _ in range(c.prelude):
                x = self.layer(x, shared, b.W_P[0], b.W_1, b.W_2[0], c.heads, True)
        else:
            joined = [torch.cat([w.W_Q, w.W_K, w.W_V]) for w in self.layers]
            for _ in range(c.loops):
                for w, W in zip(self.layers, joined, strict=True):
                    x = self.layer(x, W, w.W_P, w.W_1, w.W_2, c.heads, c.prelude_parallel)
        if not c.steps:
            return x, None, None, None
        W = self.prepare()
        past = drive = None
        g = norm(x)
        if c.settled:
            past = self.split(F.linear(g if self.kv_gamma is None else g * self.kv_gamma, W["kv"]))
        if self.W_drive is not None:
            drive = F.linear(g, self.W_drive)
        x = to_sphere(x) if c.start_norm or c.sphere else x
        if c.noise and self.training:
            x = x + c.noise * x.square().mean(-1, keepdim=True).sqrt() * torch.randn_like(x)
            x = to_sphere(x) if c.sphere else x
        return x, past, drive, W

    def read(self, x: Tensor, past: Tensor | None, drive: Tensor | None, W: dict):
        """g, queries, hidden units, keys and values."""
        g = x if self.c.sphere else norm(x)
        z = F.linear(g, W["read"])
        n = self.queries + self.hidden
        z, kv = z[..., :n], (self.split(z[..., n:]) if past is None else past)
        z = z if drive is None else z + drive
        return g, self.split(z[..., : self.queries]), z[..., self.queries :], kv

    def step(self, x, previous, start, past, drive, gains, W, W_P, W_2, attend=sdpa):
        c = self.c
        _, q, h, kv = self.read(x, past, drive, W)
        mean = attend(q, kv, c.strict, c.cone, self.scale)
        moved = F.linear(mean[..., -self.size :].transpose(1, 2).flatten(-2), W_P)
        r = F.relu(h)
        written = F.linear(r * r if c.act == "relu2" else F.gelu(h), W_2)
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x + gains[0] * moved.to(wide) + gains[1] * written.to(wide)
        if c.leak:
            y = y + W["leak"] * (start - x)
        if c.momentum:
            y = y + gains[3] * (x - previous)
        if c.inject == "state":
            y = y + gains[4] * start
        push = None
        if c.cone:
            keys = (
                (mean[..., : q.shape[-1]] * W["alpha"].to(mean.dtype)).transpose(1, 2).flatten(-2)
            )
            f = F.linear(keys, W["read"][: self.queries].T).to(wide)
            by_unit = W["units"].to(h.dtype) * slope(h, c.potential)
            f = f + F.linear(by_unit, W["read"][self.queries : self.queries + self.hidden].T).to(
                wide
            )
            f = f if self.field is None else f + self.field
            f = f.detach() if c.detach else f
            if c.force_gain:
                y = y + gains[2] * to_sphere(f)
            y, push = cone(x, y, f, 0.0 if c.sphere else self.D * EPS, c.margin, c.nudge)
        return (to_sphere(y) if c.sphere else y), push

    def walk(self, tokens: Tensor, steps: int, beyond: float | None = None, attend=None):
        """States after 0, 1, ... steps, the pushes that led there, and what they saw."""
        c = self.c
        x, past, drive, W = self.begin(tokens)
        yield x, None, (past, drive, W)
        if not steps:
            return
        step = self.compiled if attend is None else functools.partial(self.step, attend=attend)
        # Copies: the compiler makes another graph for arguments that are one and the same.
        previous = x.clone() if c.momentum else None
        start = x.clone() if c.inject == "state" or c.leak else None
        P, W_2 = self.block.W_P.unbind(), self.block.W_2.unbind()
        for t in range(steps):
            which = min(t, c.steps - 1) * c.writes // c.steps
            gains = self.schedule(t, c.beyond if beyond is None else beyond)
            new, push = step(x, previous, start, past, drive, gains, W, P[which], W_2[which])
            previous, x = (x if c.momentum else None), new
            yield x, push, (past, drive, W)

    def energies(self, x: Tensor, past: Tensor | None, drive: Tensor | None, W: dict):
        """Of attention, hidden layer and field, for each token, in the precision of x.

        ``past`` None: keys of x itself."""
        g, q, h, kv = self.read(x, past, drive, W)
        total = scores(q, kv, self.c.strict, self.scale).logsumexp(-1)
        attention = (W["alpha"][..., 0] / self.scale * total).sum(1)
        hidden = (W["units"] * phi(h, self.c.potential)).sum(-1)
        field = torch.zeros_like(hidden) if self.field is None else g @ self.field
        return -attention, -hidden, -field

    def energy(self, x: Tensor, past: Tensor | None, drive: Tensor | None, W: dict) -> Tensor:
        return sum(self.energies(x, past, drive, W))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Of each token."""
        return self.nll(x, self.tokens, self.W_readout, targets)

    def logits(self, x: Tensor) -> Tensor:
        g = norm(x) if self.W_readout is None else F.linear(norm(x), self.W_readout)
        return F.linear(g, self.tokens)

    def macs(self) -> float:
        """Multiply-adds of a token's forward pass, products and causal attention."""
        c, D, N = self.c, self.D, self.c.context
        total = c.vocabulary * D + c.readout * D * D + c.loops * c.prelude * (12 * D * D + N * D)
        if c.steps:
            n = self.queries + self.hidden
            once = 2 * D * D
            each = (
                D * n * (1 + c.cone)
                + D * (D + self.hidden)
                + N / 2 * (self.queries + D + c.cone * D)
            )
            total += c.steps * each + (once if c.settled else c.steps * once)
            total += D * n if c.inject == "drive" else 0
        return total


class Muon:
    """Momentum 0.95 (Nesterov), five Newton-Schulz iterations in bf16, for all matrices of a shape
    at once."""

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            self.groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.buffers: dict[tuple[int, ...], Tensor] = {}
        self.decay = decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, parameters in self.groups.items():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            grads = torch.cat([g.reshape(-1, *shape) for g in grads])
            buffer = self.buffers.setdefault(shape, torch.zeros_like(grads))
            buffer.lerp_(grads, 0.05)
            G = grads.lerp(buffer, 0.95).bfloat16()
            tall = shape[0] > shape[1]
            G = G.mT if tall else G
            G = G / G.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
            for _ in range(5):
                A = G @ G.mT
                G = torch.baddbmm(
                    G, torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315), G, beta=3.4445
                )
            G = (G.mT if tall else G).float()
            ratio = max(1.0, shape[0] / shape[1]) ** 0.5
            parts = G.split([p.numel() // (shape[0] * shape[1]) for p in parameters])
            torch._foreach_mul_(parameters, 1 - lr * self.decay)
            updates = [part.reshape(p.shape) for part, p in zip(parts, parameters, strict=True)]
            torch._foreach_add_(parameters, updates, alpha=-lr * ratio)


def load(folder: Path, name: str) -> np.ndarray:
    plain = folder / f"{name}.npy"
    if plain.exists():
        return np.load(plain)
    from prepare import unpack

    return unpack((folder / f"{name}.xz").read_bytes())


def rate_at(i: int, c: Config) -> float:
    if i < c.warmup:
        return (i + 1) / c.warmup
    progress = (i - c.warmup) / max(1, c.updates - 1 - c.warmup)
    return c.final + (1 - c.final) * 0.5 * (1 + math.cos(math.pi * progress))


class Turn:
    """A file that one process holds while it is being timed; the others wait before an update."""

    def __init__(self) -> None:
        path = os.environ.get("PROBE_LOCK")
        self.file = open(path, "a") if path else None  # noqa: SIM115

    def take(self) -> None:
        if self.file:
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def leave(self) -> None:
        if self.file:
            fcntl.flock(self.file, fcntl.LOCK_UN)


class Record:
    def __init__(self, path: Path, c: Config):
        self.path, self.name, self.start = path, c.name, time.time()

    def __call__(self, **values) -> None:
        line = {"name": self.name, "seconds": round(time.time() - self.start, 1), **values}
        with open(self.path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(line) + "\n")
            file.flush()
        print(line, flush=True)


def train(
    model: Model, c: Config, stream: np.ndarray, device: torch.device, record: Record
) -> dict:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if n.rpartition(".")[2].startswith("W_")]
    tables = [p for n, p in named if n in ("tokens", "positions")]
    energy = [p for n, p in named if n in ("units", "alpha", "field")]
    small = [p for n, p in named if not any(p is q for q in matrices + tables + energy)]
    muon = Muon(matrices, c.decay)
    groups = [
        {"params": tables, "weight_decay": c.decay, "rate": 1.0},
        {"params": small, "weight_decay": 0.0, "rate": 1.0},
        {"params": energy, "weight_decay": 0.0, "rate": c.energy_rate},
    ]
    groups = [g for g in groups if g["params"]]
    adamw = torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.99), fused=device.type == "cuda")
    N = c.context
    count = (len(stream) - 1) // N
    order = np.random.default_rng(c.seed).permutation(count)
    order = np.tile(order, -(-c.updates * c.batch // count))
    data = torch.from_numpy(stream.astype(np.int32)).to(device)
    starts = torch.from_numpy(order).to(device) * N
    span = torch.arange(N + 1, device=device)
    depth, turn = random.Random(c.seed), Turn()
    generator = torch.Generator(device=device).manual_seed(c.seed)
    losses, speeds, clock = [], {}, 0.0
    timed = (c.updates // 4, c.updates // 4 + 8, c.updates // 4 + 8 + c.speed)
    model.train()
    begun = time.time()
    for i in range(c.updates):
        if c.speed and i == timed[0]:
            turn.take()
        elif not timed[0] < i < timed[2]:
            turn.take()
            turn.leave()
        if c.speed and i in timed[1:]:
            synchronize(device)
            if i == timed[2]:
                speeds["alone"] = c.speed * c.batch * N / (time.time() - clock)
                turn.leave()
            clock = time.time()
        rows = data[starts[i * c.batch : (i + 1) * c.batch, None] + span].long()
        tokens, targets = rows[:, :-1], rows[:, 1:].contiguous()
        steps = depth.randint(*c.depth) if c.depth else c.steps
        with autocast(c, device):
            exits = torch.full(tokens.shape, steps, device=device)
            if c.exits:
                early = torch.rand(tokens.shape, device=device, generator=generator) < c.exits
                drawn = torch.randint(
                    c.exit_from, steps, tokens.shape, device=device, generator=generator
                )
                exits = torch.where(early, drawn, exits)
            read = None
            for t, (x, _, _) in enumerate(model.walk(tokens, steps)):
                if read is None or not c.exits:
                    read = x
                elif t >= c.exit_from:
                    read = torch.where((exits == t).unsqueeze(-1), x, read)
            loss = model.loss(read, targets).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        share = rate_at(i, c)
        for group in adamw.param_groups:
            group["lr"] = share * c.lr * group["rate"]
        muon.step(share * c.muon_lr)
        adamw.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (i + 1) % max(1, c.updates // 5) == 0:
            recent = torch.stack(losses[-max(1, c.updates // 20) :]).mean().item()
            record(event="progress", update=i + 1, train_loss=recent)
            if not math.isfinite(recent):
                raise FloatingPointError(f"loss {recent} at update {i + 1}")
    turn.leave()
    synchronize(device)
    curve = (
        torch.stack(losses).view(-1, max(1, c.updates // 20))
        if c.updates % 20 == 0
        else torch.stack(losses)[None]
    )
    return {
        "train_seconds": round(time.time() - begun, 1),
        "tokens_per_s_alone": speeds.get("alone"),
        "train_curve": [round(v, 4) for v in curve.mean(1).tolist()],
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def autocast(c: Config, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=c.precision == "bf16")


def main() -> None:
    from measure import measure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("gpu_data"))
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--json", default="{}", help="overrides of Config as JSON")
    args = parser.parse_args()
    c = Config(**json.loads(args.json))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(c.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Model(c).to(device)
    if c.compile:
        torch._dynamo.config.cache_size_limit = 64
        model.layer = torch.compile(layer, dynamic=False)
        model.nll = torch.compile(nll, dynamic=False)
        model.compiled = torch.compile(model.step, dynamic=False)
    record = Record(args.out, c)
    overrides = {k: v for k, v in json.loads(args.json).items() if k != "name"}
    learned = [
        p
        for n, p in model.named_parameters()
        if p.requires_grad and (c.cone or n not in ("units", "alpha"))
    ]
    about = {"config": overrides, "parameters": sum(p.numel() for p in learned)}
    about["forward_macs"] = model.macs()
    about |= train(model, c, load(args.data, "train"), device, record)
    record(event="trained", **about)
    measure(
        model, c, load(args.data, "val"), device, lambda **more: record(event="measured", **more)
    )
    record(
        event="done",
        gpu_memory=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    )


if __name__ == "__main__":
    main()
