"""The contract of an energy term.

A term reads a token linearly and turns what it has read into a number:

    z = read g + bias                          the readout, g = norm(x)
    E = energy(z, past) - field . g
    -dE/dg = write^T force(z, past) + field

Everything else (the products, the sum over terms, eta, the cache) is written once, for all terms.
Two things may join, which only some models have. A *drive*, where the past is settled: what token
A reads of its own start is added to z and stands still. And *write weights* of its own: tokens then
move by ``move motion`` instead of the force, and the force decides which moves are allowed
(nrgpt.model.safeguard). A term of your own states its energy and whatever else it needs:

    class Attract(nrgpt.EnergyTerm):
        def __init__(self, direction, weight):
            super().__init__()
            self.register_buffer("direction", direction)
            self.weight = weight

        def energy(self, z, past):                  # no readout: z is g
            return -self.weight * (z @ self.direction)

``model(idx, extra={"attract": Attract(v, 0.1)})`` adds it to a trained model for one call. A term
whose constructor takes the ModelConfig can be registered, ``nrgpt.register("mine", Mine)``, and
trained as ``ModelConfig(terms=("attention", "feedforward", "mine"))``.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..certificate import Finding, Guarantee
from ..norm import Norm
from ..past import Past, Shown


class Readout(NamedTuple):
    """The term's weights, as the step uses them."""

    read: Tensor | None = None  # (m, D); None: z is g
    bias: Tensor | None = None  # (m,)
    write: Tensor | None = None  # (n, D); None: read. Row subsets, alpha and scales live here
    field: Tensor | None = None  # (D,), a constant force on g
    drive: Tensor | None = None  # (m, D), reads the start of a settled token; z gets what it reads
    move: Tensor | None = None  # (D, k), write weights of its own; None: x moves by the force
    keys: Tensor | None = None  # (l, D), reads a settled past's keys instead; None: they are in z

    def z(self, g: Tensor) -> Tensor:
        """What is read of g."""
        if self.read is not None:
            return F.linear(g, self.read, self.bias)
        if self.bias is not None:
            raise ValueError("a Readout with a bias needs a read; add the bias inside energy()")
        return g

    def on_g(self, force: Tensor) -> Tensor:
        """The force on g of a force on z: write^T force + field."""
        write = self.read if self.write is None else self.write
        force = force if write is None else force @ write
        return force if self.field is None else force + self.field


class EnergyTerm(nn.Module, ABC):
    """One named part of the energy, per token and per sample. See the module's text."""

    @abstractmethod
    def energy(self, z: Tensor, past: Past) -> Tensor:
        """E of each token, shape (batch, tokens). ``past`` shows the keys of earlier tokens."""

    def force(self, z: Tensor, past: Past) -> Tensor:
        """-dE_A/dz_A with the past held fixed, in the rows of ``write``: (batch, tokens, n).

        Write it by hand where you can. This one asks autograd, inside the forward pass, which is
        slower. To autograd, keys are constants, the token's own among them: so it is the exact
        gradient where token A's energy uses the keys of B < A only.
        """
        with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
            return torch.func.grad(lambda z: -self.energy(z, past).sum())(z)

    def readout(self) -> Readout:
        return Readout()

    def keys(self, z: Tensor, g: Tensor) -> Shown | None:
        """What later tokens see of this one; None if the term acts on each token alone."""
        return None

    def guarantee(self) -> Finding:
        """EVERY_STEP for an energy that is concave in z, SMALL_STEPS for any other whose force
        is its exact gradient (which is taken on trust), NONE if it is not."""
        why = "not known to be concave (override guarantee() if it is)"
        return Finding(type(self).__name__, Guarantee.SMALL_STEPS, why)

    def energy_and_force(self, z: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Optional: both at once, worth writing where they share their work."""
        return self.energy(z, past), self.force(z, past)

    def force_and_motion(self, z: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Only for terms with write weights of their own: the force, and what is written."""
        raise NotImplementedError(f"{type(self).__name__} has no write weights of its own")

    def curvature(self, norm: Norm) -> Tensor | None:
        """Optional, for an energy that is not concave: a bound L >= 0 on the eigenvalues of the
        Hessian of E as a function of the normalised token n(x), wherever n(x) may be. With it the
        cone can keep this energy from rising too. None: no bound is known, or none is needed."""
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "energy" in own and "force" not in own and cls.force is not EnergyTerm.force:
            raise TypeError(
                f"{cls.__name__} has an energy of its own and inherits the force of another: write "
                "its force(), or have autograd find it with `force = EnergyTerm.force`"
            )
        if ("energy" in own or "force" in own) and "energy_and_force" not in own:
            cls.energy_and_force = EnergyTerm.energy_and_force  # type: ignore[method-assign]

    def extra_repr(self) -> str:
        by_autograd = type(self).force is EnergyTerm.force
        return "force by autograd: write force() to speed it up" if by_autograd else ""
