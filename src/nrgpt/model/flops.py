"""How much arithmetic a model needs: matrix-product FLOPs, counted on a model of shapes alone.

A product of (n x m) and (m x k) is 2 n m k FLOPs; elementwise work is not counted. Per token and
step, with D the width, h = hidden_factor D, H heads and N tokens in the sequence, that comes to

| part                     | read         | between        | write        |
|--------------------------|--------------|----------------|--------------|
| attention, low rank      | 2 D (2 D)    | 4 N D          | 2 D D        |
| attention, full rank     | 2 D (H D)    | 4 N H D        | 2 D (H D)    |
| FF1, dense memory        | 2 D h        |                | 2 D h        |
| FF2W                     | 2 D (2 h)    |                | 2 D (2 h)    |
| FF2                      | 2 D D        | 4 D h          | 2 D D        |
| a transformer's block    | 2 D (3 D)    | 4 N D          | 2 D D        |
| its feed-forward part    | 2 D h        |                | 2 D h        |
| write weights of its own |              | 4 N D          | 2 D D, 2 D h |

Terms that write with weights of their own need the way back of the force too if they are
safeguarded. A prelude's layers cost what a transformer's block costs, once for each passage; a
settled past makes keys (and values and drives) once, 2 D times as many rows.

Reading and writing use the same weights twice: that is why an energy with as many parameters as a
transformer's feed-forward part costs twice its FLOPs. (The paper's appendix on FLOPs says "1 - 2
times" for the whole; its full-rank heads, each as large as all of a transformer's, make it more at
12 heads: `nrgpt reproduce flops` counts how much.) Attention counts all N keys, though a causal
kernel needs half of them; ``causal`` counts that half. Folding eta costs 2 D D (rows written) once
per forward pass, not per token.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .block import Block, EnergyBlock
from .candidate import CandidateBlock
from .config import ModelConfig
from .network import Network
from .planned import total_curvature
from .transformer import TransformerBlock

BACKWARD = 2  # each product of the forward pass needs two of its size on the way back
WITH_WEIGHTS = ("mm", "addmm")
"""Products of tokens with weights; all others are between tokens."""


def flops_per_token(
    cfg: ModelConfig,
    *,
    tokens: int | None = None,
    batch: int = 1,
    steps: int | None = None,
    training: bool = True,
    causal: bool = False,
) -> float:
    """Of one token in a batch of sequences of ``tokens`` tokens (the context, if None)."""
    N = cfg.context if tokens is None else tokens
    T = cfg.steps if steps is None else steps
    per_step = sum(parts_per_step(cfg, N, causal=causal).values())
    once = folding(cfg) / (batch * N)
    before = sum(parts_before(cfg, N, causal=causal).values())
    head = 0 if cfg.block == "ebt" else 2 * cfg.width * cfg.vocab_size
    forward = before + T * per_step + once + head
    if not training:
        return forward
    if cfg.block == "ebt":
        return counted_training(cfg, N, T)
    return forward * (1 + BACKWARD) - BACKWARD * bounding(cfg) / (batch * N)


@functools.lru_cache
def parts_per_step(cfg: ModelConfig, tokens: int, *, causal: bool = False) -> dict[str, float]:
    """FLOPs of one token in one inference step, by part."""
    block = block_of_shapes(cfg)
    x = torch.empty(1, tokens, cfg.width, device="meta")
    if isinstance(block, TransformerBlock):
        joined = block.plan().joined
        parts: dict[str, Callable[[], Any]] = {
            "attention": lambda: block.attention(x, joined, 0, None),
            "feedforward": lambda: block.feedforward(x),
        }
    elif isinstance(block, CandidateBlock):
        step = block.plan()
        v, seen = step.begin(x)
        parts = {"candidate": lambda: step.move(v, 0, seen)}
    else:
        assert isinstance(block, EnergyBlock)
        plan = block.plan()
        part = plan.part if plan.cone is None else plan.push
        memory = plan.settle(x) if plan.settled else None
        parts = {
            planned.name: functools.partial(part, slot, x, 0, memory)
            for slot, planned in enumerate(plan.terms)
        }
        pushes = {planned.name: x for planned in plan.terms}
        own = {p.name: x for p in plan.terms if p.readout.move is not None}
        parts["rate"] = lambda: plan.rate.combined(pushes, 0, x, plan.norm)
        if plan.cone is not None:
            parts["push"] = lambda: plan.completed(own, pushes)
    # A per-step rate that is made of other matrices makes them once, whatever the tokens.
    made = folding(cfg) / cfg.steps if cfg.rate == "psd_skew_per_step" else 0.0
    counts = {name: count(part, causal=causal) for name, part in parts.items()}
    if counts.get("rate"):
        counts["rate"] -= made
    return {name: flops / tokens for name, flops in counts.items() if flops}


@functools.lru_cache
def parts_before(cfg: ModelConfig, tokens: int, *, causal: bool = False) -> dict[str, float]:
    """FLOPs of one token before the first step, by part."""
    with torch.device("meta"):
        model = Network(cfg)
    x = torch.empty(1, tokens, cfg.width, device="meta")
    plans = model.plan()
    parts: dict[str, Callable[[], Any]] = {
        "prelude": lambda: [layer.move(x, 0) for layer in plans.prelude],
        "keys": lambda: plans.blocks[0].begin(x),
    }
    counts = {name: count(part, causal=causal) for name, part in parts.items()}
    return {name: flops / tokens for name, flops in counts.items() if flops}


@functools.lru_cache
def counted_training(cfg: ModelConfig, tokens: int, steps: int) -> float:
    """FLOPs of one token in an update that differentiates a descent: a little less than three times
    the forward pass (with its slopes), because some factors there need no gradient."""
    with torch.device("meta"):
        model = Network(cfg).train()
        idx = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        _, loss = model(idx, idx, steps=steps, want_logits=False)
        assert loss is not None
        loss.backward()
    return counter.get_total_flops() / tokens


@functools.lru_cache
def folding(cfg: ModelConfig) -> float:
    """What a forward pass computes once, however many tokens it has."""
    block = block_of_shapes(cfg)
    once = count(block.plan)
    if cfg.block == "nrgpt" and cfg.rate == "psd_skew_per_step":
        rows = cfg.rate_rank or cfg.width
        once += cfg.steps * 2 * cfg.width * cfg.width * rows
    return once


@functools.lru_cache
def bounding(cfg: ModelConfig) -> float:
    """The part of it that has no backward pass: how much energies curve."""
    block = block_of_shapes(cfg)
    if not isinstance(block, EnergyBlock) or not block.safeguard:
        return 0.0
    return count(lambda: total_curvature(block.energy.named_terms(), block.norm))


def count(function: Callable[[], Any], *, causal: bool = False) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function()
    operations = counter.get_flop_counts().get("Global", {})
    return float(
        sum(
            flops if not causal or str(operation).split(".")[-1] in WITH_WEIGHTS else flops / 2
            for operation, flops in operations.items()
        )
    )


def block_of_shapes(cfg: ModelConfig) -> Block:
    with torch.device("meta"):
        block = Network(cfg).blocks[0]
    assert isinstance(block, Block)
    return block
