"""Does the energy go down on given data? The numbers beside the certificate.

With a frozen past (every earlier token held at its last state) the theorem applies, and a
certified model must not rise but for rounding. In parallel, as in training, earlier tokens move
while a token rolls down, and nothing is promised.
"""

from collections.abc import Iterator
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
    """(E after - E before) / max(|E before|, |E after|); negative if every step of every token
    lowers its energy."""
    step: int
    sample: int
    token: int
    share: float
    """Of all steps of all tokens, those that raise the energy by more than rounding (1e-6)."""

    def __str__(self) -> str:
        if self.relative <= 0:
            return "no step raises an energy"
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
    *_, last = model.states(idx, steps=steps, extra=extra, dropout=False)
    rises = [largest_rise(energies_along(model, idx, steps, extra, past)) for past in (None, last)]
    return Descent(*rises)


def energies_along(
    model: Network, idx: Tensor, steps: int, extra: Extra | None, past: Tensor | None
) -> Iterator[Tensor]:
    """Each token's energy before the first step and after each one."""
    field = Field(model, *idx.shape, extra=extra, past=past)
    x = model.embed(idx)
    for t in range(steps + 1):
        field.commit(x)
        look = field.look(x, t)
        yield look.energy
        x = x + look.update


def largest_rise(energies: Iterator[Tensor]) -> Rise:
    before = next(energies)
    rises = []
    for after in energies:
        size = torch.maximum(before.abs(), after.abs()).clamp(min=torch.finfo(after.dtype).tiny)
        rises.append((after - before) / size)
        before = after
    rise = torch.stack(rises)
    place = torch.unravel_index(rise.argmax(), rise.shape)
    step, sample, token = (int(i) for i in place)
    return Rise(float(rise.max()), step, sample, token, float((rise > 1e-6).double().mean()))
