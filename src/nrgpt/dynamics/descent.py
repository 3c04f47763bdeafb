"""Does the energy fall on given data? Numbers to go with the certificate.

*In the forward pass*: each token's energy after a step, against the one before. If the past is
settled, a certificate speaks of this. If it moves, earlier tokens change a token's energy while it
rolls down, and nothing is proved. What is proved then, and measured here too: *within a step*, the
energy does not rise among the keys as they were before the step; and *with a frozen past*, every
earlier token held at its last state, it does not rise over all steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.network import Network
from ..model.step import Extra
from .field import Field


@dataclass(frozen=True)
class Rise:
    """The largest rise of any token's energy in one step, relative to the energy's size."""

    relative: float
    """(E after - E before) / max(|E before|, |E after|); negative if every step lowers every
    energy."""
    step: int
    sample: int
    token: int
    share: float
    """The share of all steps of all tokens that raise the energy by more than rounding, 1e-6."""

    def __str__(self) -> str:
        if self.relative <= 0:
            return "no step raises an energy"
        if self.relative == float("inf"):
            return f"energies that are not finite, in {100 * self.share:.1f} % of steps"
        where = f"token {self.token} of sample {self.sample}, step {self.step}"
        return f"largest rise {self.relative:.1e} ({where}); {100 * self.share:.1f} % of steps rise"


@dataclass(frozen=True)
class Descent:
    parallel: Rise
    """In the forward pass, all tokens at once. With a settled past the other two are the same, and
    so they are of the one energy of an Energy Transformer."""
    within: Rise
    frozen: Rise
    settled: bool

    def __str__(self) -> str:
        lines = [f"  in the forward pass  {self.parallel}"]
        if not self.settled:
            lines.append(f"  within a step        {self.within}")
            lines.append(f"  with a frozen past   {self.frozen}")
        return "\n".join(lines)


@torch.no_grad()
def check_descent(
    model: Network, idx: Tensor, *, steps: int | None = None, extra: Extra | None = None
) -> Descent:
    """Follow the energies of the tokens ``idx`` (batch, tokens). Best in float64: a converged
    token's energy changes by less than float32 can tell.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.descent import check_descent
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8,
    ...     feedforward="memory", rate="gamma", learn_alpha=False)
    >>> model = nrgpt.LanguageModel(cfg).double()
    >>> bool(model.certificate())
    True
    >>> check_descent(model, torch.randint(65, (2, 32))).frozen.relative < 1e-10
    True
    """
    steps = model.check_steps(steps)
    if model.cfg.block == "et":
        whole = rise_of_states(sequence_energies(model, idx, steps, extra))
        return Descent(whole, whole, whole, True)
    start = model.begin(idx, extra)
    field = Field(model, start, extra=extra)
    energies, afterwards = [], []
    for t, (x, look) in enumerate(field.roll(start, steps + 1)):
        energies.append(look.energy)
        if t < steps and not model.is_settled:
            afterwards.append(field.energy(x + look.update, t))
    parallel = rise_of_states(energies)
    if model.is_settled:
        return Descent(parallel, parallel, parallel, True)
    within = largest_rise(torch.stack(energies[:-1]), torch.stack(afterwards))
    states = Field(model, start, extra=extra, past=x).roll(start, steps + 1)
    frozen = rise_of_states([look.energy for _, look in states])
    return Descent(parallel, within, frozen, False)


def sequence_energies(model: Network, idx: Tensor, steps: int, extra: Extra | None) -> list[Tensor]:
    """The one energy of each text, (batch, 1), before the first step and after each."""
    plan = model.energy_block.plan(extra)
    states = model.states(idx, steps=steps, extra=extra, dropout=False)
    energies = (torch.stack(list(plan.energies(x).values())) for x in states)
    return [energy.sum((0, -1))[:, None] for energy in energies]


def rise_of_states(energies: list[Tensor]) -> Rise:
    """From one state to the next."""
    return largest_rise(torch.stack(energies[:-1]), torch.stack(energies[1:]))


def largest_rise(before: Tensor, after: Tensor) -> Rise:
    """Of energies (steps, batch, tokens)."""
    size = torch.maximum(before.abs(), after.abs()).clamp(min=torch.finfo(before.dtype).tiny)
    rise = ((after - before) / size).nan_to_num(nan=float("inf"))
    step, sample, token = (int(i) for i in torch.unravel_index(rise.argmax(), rise.shape))
    return Rise(float(rise.max()), step, sample, token, float((rise > 1e-6).double().mean()))
