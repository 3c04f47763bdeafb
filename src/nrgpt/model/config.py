"""What decides a model: its shape, its energy, and where its weights start."""

import math
from typing import Any, Literal

from ..check import check, check_choice, strict, suggestion
from .registry import BUILT_IN, known_energies


@strict
class ModelConfig:
    """Everything that decides a LanguageModel's shape and its starting point.

    The defaults follow the paper's text. Fields that only one kind of block reads are marked:
    [nrgpt], [baselines] for gpt, rgpt and rgpt_parallel, [et] or [ebt]. An et has an energy and
    reads most of what is marked [nrgpt] as well.
    """

    vocab_size: int = 50_257
    context: int = 1_024
    """Longest sequence, in tokens; positions are learned."""
    width: int = 768
    """D, the size of a token's state."""
    heads: int = 12
    steps: int = 12
    """T: inference steps of a recurrent block; for gpt, the number of distinct blocks."""
    block: Literal["nrgpt", "gpt", "rgpt", "rgpt_parallel", "et", "ebt"] = "nrgpt"
    """nrgpt; the matched baselines gpt, rgpt and rgpt_parallel; or its neighbours: et, an Energy
    Transformer, and ebt, an Energy-Based Transformer (docs/neighbours.md)."""

    mask: Literal["strict", "released", "inclusive"] = "strict"
    """[nrgpt] Which tokens B a token A attends to: B < A; B <= A as the authors' code does it,
    whose update is no gradient; B <= A with the exact gradient."""
    coupling: Literal["low_rank", "full"] = "low_rank"
    """[nrgpt] J_h = W_K^T W_Q of rank width / heads, or one full D x D matrix per head."""
    beta: float | None = None
    """Inverse temperature of the attention scores; None is 1 / sqrt(width / heads)."""
    learn_alpha: bool = True
    """[nrgpt] A learnable weight alpha_h for each head's energy."""
    alpha_init: float = 1.0
    """[nrgpt] Where alpha begins: how strong attention is beside the feed-forward part."""

    terms: tuple[str, ...] = ("attention", "feedforward")
    """[nrgpt] The energy's terms, by name: "attention", "feedforward" (the energy that the next
    field names), ff1, ff2w, ff2, memory, or any that you registered."""
    feedforward: str = "ff2w"
    """[nrgpt] The feed-forward energy: ff1, ff2w, ff2, memory, or one you registered."""
    potential: Literal["relu2", "gelu", "softplus", "softplus2"] = "relu2"
    """[nrgpt] F of feedforward="memory"."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """sigma of ff1, ff2w, ff2 and of the baselines; gelu_tanh is GPT-2's approximation."""
    hidden_factor: int = 4
    """Hidden size of the feed-forward part, in units of width."""
    bias: bool = False
    """Biases in the feed-forward part (in the baselines, in the attention's output too)."""
    attention_bias: bool = False
    """[baselines] Biases of queries, keys and values."""
    feedforward_scale: bool = False
    """[nrgpt] A learnable factor before the feed-forward energy."""

    norm: Literal["layernorm", "rmsnorm", "none"] = "layernorm"
    norm_eps: float = 1e-5
    learn_gamma: bool = True
    """Learn gamma of the block's norm (fixed at 1 otherwise)."""
    learn_delta: bool = True
    """Learn delta of the block's LayerNorm (fixed at 0 otherwise; RMSNorm has none)."""
    separate_norms: bool = False
    """[rgpt_parallel] One norm before attention and another before the feed-forward part."""
    values: Literal["own", "identity"] = "own"
    """[baselines] identity: attention without value and projection matrices, as in simplified
    transformer blocks: each head mixes its part of g as it is."""
    sight: Literal["others", "all", "earlier"] = "others"
    """[et] Which tokens a token attends to. Whichever they are, it also feels those that attend to
    it, so that no et is causal."""
    layers: int = 4
    """[ebt] Layers of the transformer whose output is a candidate's energy; ``steps`` are those of
    its descent."""

    rate: Literal[
        "identity",
        "scalar",
        "gamma",
        "gamma_per_step",
        "free",
        "free_per_step",
        "free_per_term",
        "gains",
        "psd_skew",
        "psd_skew_per_step",
        "state",
    ] = "free"
    """[nrgpt] The inference rate eta; see nrgpt.model.rate for what each promises."""
    rate_init: Literal["identity", "random"] = "identity"
    """[nrgpt] Where a matrix eta starts: at rate_scale times 1, or at random (std init_std)."""
    rate_scale: float = 1.0
    """[nrgpt, ebt] The initial size c of eta."""
    rate_rank: int | None = None
    """[nrgpt] Rows D' of U in eta = U^T U + V - V^T; None is width."""

    safeguard: Literal["none", "cone"] = "none"
    """[nrgpt] cone: after each update, the least push along the force that keeps the energy from
    rising while the past stands still; see nrgpt.model.safeguard. alpha is kept above zero."""
    margin: float = 0.0
    """[nrgpt] safeguard="cone": the share by which 1 - cos of the angle between token and force
    must shrink in each step. 0: it may not grow."""
    write: Literal["tied", "free"] = "tied"
    """[nrgpt] What moves a token. tied: the energy's gradient, as in the paper. free: weights of
    their own, values and a projection in attention and a second matrix in feedforward="memory",
    whose hidden units then have learned weights >= 0 in the energy."""

    past: Literal["moving", "settled"] = "moving"
    """[nrgpt] moving: at every step a token sees the others where they are then, as in the paper.
    settled: keys and values are made once, before the first step, and stand still."""
    prelude: int = 0
    """[nrgpt] Ordinary causal layers before the first step."""
    prelude_loops: int = 1
    """[nrgpt] How often the prelude's layers are gone through."""
    prelude_block: Literal["sequential", "parallel", "shared"] = "sequential"
    """[nrgpt] The prelude's layers: of a GPT, of RGPT-parallel, or, with past="moving", the energy
    block's own moves before the cone holds: they say where tokens start to roll."""
    start: Literal["as_is", "sphere"] = "as_is"
    """[nrgpt] sphere: states are scaled to |x| = sqrt(width) before the first step."""
    drive: bool = False
    """[nrgpt] past="settled": queries and hidden units also read the token's start at every step,
    through weights of their own."""

    tied: bool = True
    """The head's weights are the token embedding's."""
    head_bias: bool = False
    dropout: float = 0.0
    """On the embeddings and on each applied update, never inside a force."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        counted = ("vocab_size", "context", "width", "heads", "steps", "hidden_factor")
        for name in (*counted, "prelude_loops", "layers"):
            value = getattr(self, name)
            check(value >= 1, name, value, "at least 1")
        check(self.prelude >= 0, "prelude", self.prelude, "at least 0")
        check(0 <= self.margin < 1, "margin", self.margin, "in [0, 1)")
        splits_width = not (self.has_energy and self.coupling == "full")
        divides = self.width % self.heads == 0 or not splits_width
        check(divides, "heads", self.heads, f"a divisor of width = {self.width}")
        self.check_terms()
        check(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        for name in ("beta", "alpha_init", "rate_scale", "init_std", "rate_rank"):
            value = getattr(self, name)
            is_positive = value is None or 0 < value < math.inf
            check(is_positive, name, value, "positive and finite")
        eps_is_fine = 0 <= self.norm_eps < math.inf
        check(eps_is_fine, "norm_eps", self.norm_eps, "at least 0 and finite")
        if self.block == "nrgpt":
            self.check_descent()
        self.check_neighbours()
        self.check_no_idle_options()

    @property
    def has_energy(self) -> bool:
        """Whether its block is the gradient of an energy of each token, or of all tokens."""
        return self.block in ("nrgpt", "et")

    def check_neighbours(self) -> None:
        """What an et and an ebt cannot be combined with."""
        only: dict[str, dict[str, Any]] = {
            "et": {"past": "moving", "write": "tied"},
            "ebt": {"dropout": 0.0, "tied": True, "head_bias": False},
        }
        for name, wanted in only.get(self.block, {}).items():
            value = getattr(self, name)
            check(value == wanted, name, value, f"{wanted!r} with block = {self.block!r}")

    @property
    def kinds(self) -> set[str]:
        """The energies that the terms are."""
        return {self.feedforward if name == "feedforward" else name for name in self.terms}

    def check_descent(self) -> None:
        """What settled models and those with write weights of their own need."""
        settled, free = self.past == "settled", self.write == "free"
        divides = self.width % self.heads == 0 or not self.prelude
        check(divides, "heads", self.heads, f"a divisor of width = {self.width} for the prelude")
        shares = self.prelude_block == "shared"
        why = "of another kind with past = 'settled', whose keys its layers make"
        check(not (shares and settled), "prelude_block", self.prelude_block, why)
        why = "strict or inclusive with past = 'settled', where both have the exact gradient"
        check(not settled or self.mask != "released", "mask", self.mask, why)
        why = f"with write = 'free', 'memory' (terms are {', '.join(self.terms)})"
        has_other = bool(self.kinds & {"ff1", "ff2w", "ff2"})
        check(not free or not has_other, "feedforward", self.feedforward, why)
        why = "'low_rank' with write = 'free', whose values belong to heads"
        check(not free or self.coupling == "low_rank", "coupling", self.coupling, why)
        rates = ("identity", "scalar", "gains")
        why = f"one of {', '.join(rates)} with write = 'free', which has matrices of its own"
        check(not free or self.rate in rates, "rate", self.rate, why)

    def check_terms(self) -> None:
        energies = [name for name in known_energies() if name != "attention"]
        given = (("feedforward", self.feedforward), *(("terms", name) for name in self.terms))
        for field, name in given:
            if isinstance(name, str) and name not in ("attention", "feedforward", *energies):
                near = suggestion(name, ["attention", "feedforward", *energies])
                raise ValueError(
                    f"{field} = {name!r}: no energy has that name{near} (one of your own must be "
                    "registered first: nrgpt.register, or --plugin MODULE)"
                )
        check_choice("feedforward", self.feedforward, energies)
        check(len(self.terms) > 0, "terms", self.terms, "at least one energy")
        is_unique = len(set(self.terms)) == len(self.terms)
        check(is_unique, "terms", self.terms, "different from one another")
        for name in self.terms:
            check_choice("terms", name, ["attention", "feedforward", *energies])

    def check_no_idle_options(self) -> None:
        """An option that would change nothing is a misunderstanding. (Fields of other blocks may
        stand: a comparison changes ``block`` and nothing else.)"""
        has_norm = self.norm != "none"
        idle = [
            ("norm_eps", not has_norm, "norm"),
            ("learn_gamma", not has_norm, "norm"),
            ("learn_delta", self.norm != "layernorm", "norm"),
        ]
        if self.has_energy:
            kinds = self.kinds
            has_matrix = self.rate.startswith(("free", "psd_skew"))
            is_own = not kinds <= set(BUILT_IN)  # an energy of one's own may read any field
            has_attention = "attention" in kinds or is_own
            has_layers = self.prelude > 0 and self.prelude_block != "shared"
            has_layers = has_layers and self.block == "nrgpt"
            has_feedforward = bool(kinds - {"attention"}) or has_layers
            acts = {"ff1", "ff2w", "ff2"} | ({"memory"} if self.write == "free" else set())
            has_activation = bool(kinds & acts) or is_own or has_layers
            attention = ("mask", "coupling", "beta", "learn_alpha", "alpha_init")
            feedforward = ("hidden_factor", "bias", "feedforward_scale")
            idle += [(name, not has_attention, "terms") for name in attention]
            idle += [(name, not has_feedforward, "terms") for name in feedforward]
            idle += [
                ("feedforward", "feedforward" not in self.terms, "terms"),
                ("separate_norms", True, "block"),
                ("attention_bias", not has_layers, "prelude"),
                ("activation", not has_activation, "terms"),
                ("potential", not ("memory" in kinds or is_own), "terms"),
                ("alpha_init", not self.learn_alpha, "learn_alpha"),
                ("rate_scale", self.rate == "identity", "rate"),
                ("rate_init", not has_matrix, "rate"),
                ("rate_rank", not self.rate.startswith("psd_skew"), "rate"),
                ("margin", self.safeguard == "none", "safeguard"),
                ("drive", self.past == "moving", "past"),
                ("mask", self.block == "et", "block"),
                ("prelude", self.block == "et", "block"),
                ("start", self.block == "et", "block"),
                ("prelude_loops", self.prelude == 0, "prelude"),
                ("prelude_block", self.prelude == 0, "prelude"),
            ]
        for name, is_idle, beside in idle:
            value = getattr(self, name)
            is_default = value == type(self).__dataclass_fields__[name].default
            why = f"left alone: {beside} = {getattr(self, beside)!r} makes no use of it"
            check(is_default or not is_idle, name, value, why)

    @property
    def head_width(self) -> int:
        """Y = D / H."""
        return self.width // self.heads

    @property
    def score_scale(self) -> float:
        """beta as a number."""
        return (self.width / self.heads) ** -0.5 if self.beta is None else self.beta

    @property
    def hidden(self) -> int:
        return self.hidden_factor * self.width
