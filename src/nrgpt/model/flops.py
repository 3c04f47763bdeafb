"""How much arithmetic a model needs: matrix-product FLOPs, by formula.

A product of (n x m) and (m x k) is 2 n m k FLOPs; elementwise work is not counted. Per token and
step, with D the width, h = hidden_factor D, H heads and N tokens in the sequence:

| part                     | read         | between        | write        |
|--------------------------|--------------|----------------|--------------|
| attention, low rank      | 2 D (2 D)    | 4 N D          | 2 D D        |
| attention, full rank     | 2 D (H D)    | 4 N H D        | 2 D (H D)    |
| FF1, dense memory        | 2 D h        |                | 2 D h        |
| FF2W                     | 2 D (2 h)    |                | 2 D (2 h)    |
| FF2                      | 2 D D        | 4 D h          | 2 D D        |
| a transformer's block    | 2 D (3 D)    | 4 N D          | 2 D D        |
| its feed-forward part    | 2 D h        |                | 2 D h        |

Reading with R and writing with eta R^T uses the same weights twice: that is why an energy with as
many parameters as a transformer's feed-forward part costs twice its FLOPs. (The paper's appendix on
FLOPs says "1 - 2 times" for the whole; its full-rank heads, each as large as all of a
transformer's, make it more at 12 heads: `nrgpt reproduce flops` counts how much.) Attention counts
all N keys, though a causal kernel needs half of them; ``causal`` counts that half. Folding eta
costs 2 D D (rows written) once per forward pass, not per token.
"""

from .config import ModelConfig

BACKWARD = 2  # each product of the forward pass needs two of its size on the way back


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
    forward = T * per_step + once + 2 * cfg.width * cfg.vocab_size
    return forward * (1 + BACKWARD if training else 1)


def parts_per_step(cfg: ModelConfig, tokens: int, *, causal: bool = False) -> dict[str, float]:
    """FLOPs of one token in one inference step, by part."""
    D, h, N = cfg.width, cfg.hidden, tokens
    seen = N / 2 if causal else N
    if cfg.block != "nrgpt":
        return {"attention": 8 * D * D + 4 * seen * D, "feedforward": 4 * D * h}
    size = cfg.heads * (D if cfg.coupling == "full" else cfg.head_width)  # of all queries
    read, written = rows(cfg)
    if cfg.mask == "strict":  # N - 1 queries look at N - 1 keys
        seen = seen * (N - 1) ** 2 / N**2
    between = 4 * seen * size
    if cfg.mask == "inclusive":  # the scores once more, for the weight of the token itself
        between += 2 * N * size
    parts = {
        "attention": 2 * D * (read["attention"] + written["attention"]) + between,
        "feedforward": 2 * D * (read["feedforward"] + written["feedforward"]),
    }
    if cfg.feedforward == "ff2":
        parts["feedforward"] += 4 * D * h
    if cfg.rate.endswith("_per_step") and not cfg.rate.startswith("gamma"):
        parts["rate"] = 2 * D * D
    if cfg.rate == "state":
        parts["rate"] = 2 * D * D
    return parts


def rows(cfg: ModelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """How many rows each energy term reads, and how many of them it writes back with."""
    D, h = cfg.width, cfg.hidden
    keys = D
    queries = cfg.heads * D if cfg.coupling == "full" else D
    reads_keys = cfg.coupling == "low_rank" or cfg.mask == "inclusive"
    feedforward = {"ff1": h, "memory": h, "ff2w": 2 * h, "ff2": D}
    if cfg.feedforward not in feedforward:
        raise ValueError(
            f"feedforward = {cfg.feedforward!r}: no formula for an energy of your own; count with "
            "torch.utils.flop_counter.FlopCounterMode"
        )
    read = {"attention": queries + keys * reads_keys, "feedforward": feedforward[cfg.feedforward]}
    written = {
        "attention": queries + keys * (cfg.mask == "inclusive"),
        "feedforward": feedforward[cfg.feedforward],
    }
    return read, written


def folding(cfg: ModelConfig) -> float:
    """What a forward pass computes once, however many tokens it has."""
    if cfg.block != "nrgpt":
        return 0
    D = cfg.width
    _, written = rows(cfg)
    U = cfg.rate_rank or D
    if cfg.rate in ("free", "free_per_term"):
        return 2 * D * D * sum(written.values())
    if cfg.rate == "psd_skew":  # eta is made anew for each of the two terms
        return 2 * D * D * sum(written.values()) + 2 * (2 * D * D * U)
    if cfg.rate == "psd_skew_per_step":
        return cfg.steps * 2 * D * D * U
    return 0
