"""Does the energy fall on given data? Numbers to go with the certificate.

With a frozen past (every earlier token held at its last state) the theorem applies: in a certified
model no energy rises, except by rounding. In parallel, as in training, earlier tokens move while a
token rolls down, and nothing is guaranteed.
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
    frozen: Rise

    def __str__(self) -> str:
        return f"  frozen past  {self.frozen}\n  in parallel  {self.parallel}"


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
    last = model.last_state(idx, steps=steps, extra=extra, dropout=False)
    rises = []
    for past in (None, last):
        field = Field(model, *idx.shape, extra=extra, past=past)
        states = field.roll(model.embed(idx), steps + 1)
        rises.append(largest_rise(torch.stack([look.energy for _, look in states])))
    return Descent(*rises)


def largest_rise(energies: Tensor) -> Rise:
    """Of energies (states, batch, tokens)."""
    before, after = energies[:-1], energies[1:]
    size = torch.maximum(before.abs(), after.abs()).clamp(min=torch.finfo(energies.dtype).tiny)
    rise = ((after - before) / size).nan_to_num(nan=float("inf"))
    step, sample, token = (int(i) for i in torch.unravel_index(rise.argmax(), rise.shape))
    return Rise(float(rise.max()), step, sample, token, float((rise > 1e-6).double().mean()))
