"""Do tokens come to rest, when, and do they come back if they are pushed?

The paper argues that they come to rest one after the other: the first token rolls to the bottom of
a fixed landscape, then the second token's landscape no longer changes, and so on ("asymptotic
stability"). ``transients`` measures this: it runs past the trained steps and finds when each
token's g stops moving. ``stability`` pushes the tokens and follows the push. Without ``past`` all
tokens move together; with it, each moves among earlier ones held in these states.

On Ctrl-C both return what they have so far. Best in float64: a token at rest moves by less than
float32 can tell.

>>> import nrgpt, torch
>>> from nrgpt.dynamics.convergence import stability, transients
>>> cfg = nrgpt.ModelConfig(vocab_size=65, context=16, width=16, heads=2, steps=4,
...     feedforward="memory", rate="gamma", learn_alpha=False)
>>> model, idx = nrgpt.LanguageModel(cfg).double(), torch.randint(65, (3, 16))
>>> found = transients(model, idx, steps=200, tolerance=1e-2)
>>> found.lengths.shape, found.by_position().shape
(torch.Size([3, 16]), torch.Size([16]))
>>> bool(found.share_at_rest.min() > 0.9)
True
>>> bool(stability(model, idx, settle=100, steps=100).left.median() < 1)
True
"""

import math
from dataclasses import dataclass

import torch
from rich.progress import track
from torch import Tensor

from ..check import check
from ..model.network import Network
from ..model.step import Extra
from .field import Field
from .meaning import rank_correlation
from .relax import relax
from .short import short


@short
@dataclass(frozen=True)
class Transients:
    tolerance: float
    trained_steps: int
    moves: Tensor
    """||g - g before|| / ||g before|| of each step taken: (steps, batch, tokens)."""
    x: Tensor
    """The last states, (batch, tokens, D)."""

    @property
    def steps(self) -> int:
        """Steps taken: fewer than asked for if interrupted."""
        return len(self.moves)

    @property
    def lengths(self) -> Tensor:
        """How many steps each token takes until it moves by no more than the tolerance, from then
        on to the last step; NaN for tokens that still move then. (batch, tokens)"""
        t = torch.arange(1, self.steps + 1)[:, None, None]
        # A move that is NaN counts as moving.
        last_move = torch.where(self.moves <= self.tolerance, 0, t).amax(0).double()
        return last_move.masked_fill(last_move == self.steps, float("nan"))

    @property
    def share_at_rest(self) -> Tensor:
        """The share of texts whose token is at rest, by position: (tokens,)."""
        return self.lengths.isfinite().double().mean(0)

    def at_rest(self, positions: range) -> Tensor:
        """The share of the tokens at these positions that is at rest, for good, after 0, 1, ...
        steps: (steps + 1,)."""
        lengths = self.lengths[:, positions.start : positions.stop].flatten()
        return (lengths <= torch.arange(self.steps + 1)[:, None]).double().mean(1)

    def by_position(self, quantile: float = 0.5) -> Tensor:
        """A quantile of the transient lengths over the texts, (tokens,). Tokens that never came to
        rest count as longest; where they reach the quantile, it is NaN."""
        lengths = self.lengths.nan_to_num(nan=float("inf"))
        found = torch.quantile(lengths, quantile, dim=0, interpolation="higher")
        return found.masked_fill(found.isinf(), float("nan"))


@torch.no_grad()
def transients(
    model: Network,
    idx: Tensor,
    *,
    steps: int,
    tolerance: float = 1e-3,
    past: Tensor | None = None,
    extra: Extra | None = None,
    progress: bool = False,
) -> Transients:
    """Roll the tokens ``idx`` (batch, tokens) for ``steps`` steps, many more than trained."""
    steps = model.check_steps(steps)
    check(tolerance > 0, "tolerance", tolerance, "positive")
    moves: list[Tensor] = []
    start = model.begin(idx, extra)
    field = Field(model, start, extra=extra, past=past)
    states = field.roll(start, steps + 1)
    x, look = next(states)
    before = look.g
    try:
        for x, look in track(states, "transients", total=steps, disable=not progress):  # noqa: B007
            moves.append(((look.g - before).norm(dim=-1) / before.norm(dim=-1)).cpu())
            before = look.g
    except KeyboardInterrupt:
        if not moves:
            raise
    return Transients(tolerance, model.cfg.steps, torch.stack(moves), x)


@short
@dataclass(frozen=True)
class Stability:
    distances: Tensor
    """||g pushed - g|| after 0, 1, ... steps, in units of ||g|| at the push: (steps + 1, batch,
    tokens)."""
    rounding: float
    """Distances below this are noise."""
    settled: int
    """Steps before the push."""

    @property
    def steps(self) -> int:
        return len(self.distances) - 1

    @property
    def left(self) -> Tensor:
        """How much of the push is left at the end, (batch, tokens); above 1 it has grown."""
        return self.distances[-1] / self.distances[0]

    @property
    def factors(self) -> Tensor:
        """By what factor a step changes the distance, (batch, tokens): the geometric mean over the
        steps before it is lost in rounding, or e to the power of a finite-time Lyapunov exponent.
        Below 1 the token comes back."""
        below = (self.distances <= self.rounding).int()
        # The last step before the first distance that is noise, or the last of all.
        last = torch.where(below.any(0), below.argmax(0) - 1, self.steps).clamp(min=1)
        ends = self.distances.gather(0, last[None])[0].clamp(min=self.rounding)
        return (ends / self.distances[0]) ** (1 / last)

    @property
    def powers(self) -> Tensor:
        """p, if the distance falls as (steps since the start)^-p, (batch, tokens). Under a norm x
        keeps growing, in proportion to the steps once a token is at rest, and the same move of x
        turns g less and less. So tokens come back as a power of the steps, and factors tend to 1.
        A push that is neither pulled back nor driven away has p = 1 for this reason alone; above 1,
        the landscape pulls it back."""
        longer = (self.settled + self.steps) / self.settled
        return -self.left.log() / math.log(longer)

    @property
    def share_back(self) -> float:
        """The share of tokens that have at most half of the push left."""
        return float((self.left <= 0.5).double().mean())


@torch.no_grad()
def stability(
    model: Network,
    idx: Tensor,
    *,
    settle: int,
    steps: int,
    size: float = 1e-2,
    past: Tensor | None = None,
    extra: Extra | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Stability:
    """Let the tokens settle for ``settle`` steps, push each in a random direction by ``size`` times
    its length, and follow it beside its own undisturbed path for ``steps`` steps.

    In parallel all tokens are pushed at once, and later ones feel what happens to earlier ones. The
    push changes x, of which a norm sees only the part across x; distances are those of g.
    """
    settle, steps = model.check_steps(settle), model.check_steps(steps)
    check(size > 0, "size", size, "positive")
    rest = relax(model, idx, steps=settle, past=past, extra=extra).x
    push = torch.empty_like(rest).normal_(generator=generator)
    push = size * rest.norm(dim=-1, keepdim=True) * push / push.norm(dim=-1, keepdim=True)
    both = torch.cat([rest, rest + push])
    twice = None if past is None else torch.cat([past, past])
    start = model.begin(idx, extra)
    field = Field(model, torch.cat([start, start]), extra=extra, past=twice)
    unit = model.energy_block.norm(rest).norm(dim=-1)
    distances: list[Tensor] = []
    try:
        states = field.roll(both, steps + 1, start=settle)
        for _, look in track(states, "stability", total=steps + 1, disable=not progress):
            g, pushed = look.g.chunk(2)
            distances.append(((pushed - g).norm(dim=-1) / unit).cpu())
    except KeyboardInterrupt:
        if len(distances) < 2:
            raise
    return Stability(torch.stack(distances), 1e3 * torch.finfo(rest.dtype).eps, settle)


def settling_order(energy: Tensor) -> float:
    """Do later tokens settle later? The rank correlation between a token's position and the step
    from which its energy (states, batch, tokens) stays near its last value, to within 5 % of the
    energy's range.

    >>> steps = torch.arange(40)[:, None, None]
    >>> one_after_the_other = torch.exp(-steps / torch.arange(1, 9))
    >>> settling_order(one_after_the_other)
    1.0
    """
    span = (energy.amax(0) - energy.amin(0)).clamp(min=1e-12)
    is_away = (energy - energy[-1]).abs() > 0.05 * span
    step = torch.arange(1, len(energy) + 1, device=energy.device)[:, None, None]
    settled = (is_away * step).amax(0).flatten()
    position = torch.arange(energy.shape[-1], device=energy.device).repeat(energy.shape[1])
    return rank_correlation(position, settled)
