"""The contract of an energy term.

A term reads a token linearly and turns what it read into a number:

    z_A = R g_A + b                     the readout, the term's weights
    E_A = energy(z_A, keys) - h . g_A   h: an optional constant field
    -dE_A/dg_A = R^T force(z_A, keys) + h,    force = -d energy / dz

Everything around it (the products with R and R^T, the sum over terms, eta) is written once, for
all terms. A term of your own states ``energy`` and what else it needs:

    class Attract(nrgpt.EnergyTerm):
        def __init__(self, direction, weight):
            super().__init__()
            self.register_buffer("direction", direction)
            self.weight = weight

        def energy(self, z, keys):                  # no readout: z is g
            return -self.weight * (z @ self.direction)

``model(idx, extra={"attract": Attract(v, 0.1)})`` adds it to a trained model for one call.
Registered as ``nrgpt.model.energy.FEEDFORWARD["mine"] = Mine`` (a class that takes
the ModelConfig), it
can be trained as ``ModelConfig(feedforward="mine")``.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...decode.cache import Seen
from ..certificate import Finding, Guarantee


class Readout(NamedTuple):
    """z = weight g + bias, and a constant field on g. Without a weight, z is g itself."""

    weight: Tensor | None = None  # R, (m, D)
    bias: Tensor | None = None  # b, (m,)
    field: Tensor | None = None  # h, (D,)


def read(readout: Readout, g: Tensor) -> Tensor:
    """z of g."""
    if readout.weight is not None:
        return F.linear(g, readout.weight, readout.bias)
    if readout.bias is not None:
        raise ValueError("a Readout with a bias needs a weight; add the bias inside energy()")
    return g


class EnergyTerm(nn.Module, ABC):
    """One named part of the energy, per token and per sample. See the module's text."""

    written: int | None = None
    """How many leading rows of z the token's own energy depends on, all if None. ``force``
    returns these only. (Attention reads keys for others to see: they are not written.)"""

    def readout(self) -> Readout:
        return Readout()

    def keys(self, z: Tensor, g: Tensor) -> Tensor | None:
        """What later tokens may see of this one; None if the term acts on each token alone."""
        return None

    @abstractmethod
    def energy(self, z: Tensor, keys: Tensor | None) -> Tensor:
        """E of each token, shape (batch, tokens). Token A may use the keys of tokens B < A; its own
        key only in a term that writes its force by hand (see ``force``)."""

    def force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        """-dE_A/dz_A with the keys held fixed, shape (batch, tokens, written rows).

        Written by hand where it can be. This one asks autograd, inside the forward pass, which is
        slower. It is the exact gradient where token A's energy uses no key but those of B < A: to
        autograd, keys are constants, the token's own among them.
        """
        if self.written is not None:
            raise ValueError(
                f"{type(self).__name__} has written = {self.written} but no force(): autograd "
                "gives the force on every row of z; write force(), or leave written at None"
            )
        return torch.func.grad(lambda z: -self.energy(z, keys).sum())(z)

    def energy_and_force(self, z: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both at once, for those who watch. Worth writing where they share their work."""
        return self.energy(z, keys), self.force(z, keys)

    def force_among(self, z: Tensor, keys: Tensor, kept: Tensor, seen: Seen) -> Tensor:
        """``force`` of new tokens in cached decoding: their own keys are among the ``kept`` ones of
        all tokens, of which they may see what ``seen`` says. Only for terms with keys."""
        raise ValueError(
            f"{type(self).__name__} has keys but no force_among(), which decoding with a cache "
            'asks for; write it, or generate with cache="none"'
        )

    def gain(self) -> Tensor | None:
        """Factors of the force that no token changes, one for each written row. The model's own
        loop puts them into the way back, once for all steps, and asks for the bare forces: those
        without them."""
        return None

    def bare_force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return self.force(z, keys)

    def bare_force_among(self, z: Tensor, keys: Tensor, kept: Tensor, seen: Seen) -> Tensor:
        return self.force_among(z, keys, kept, seen)

    def bare_force_beside(self, left: Tensor, z: Tensor, keys: Tensor | None) -> Tensor:
        """``bare_force`` on the right of what other terms have made: decoding wants them side by
        side, and counts every kernel."""
        return torch.cat([left, self.bare_force(z, keys)], dim=-1)

    def update(self, g: Tensor, readout: Readout, write: Tensor, field: Tensor | None) -> Tensor:
        """What the term adds to x in one step, shape (batch, tokens, D): the bare force, written
        back by ``write`` (D, written rows), and the field. Worth writing where one kernel does it
        all; it must not differ from this one."""
        z = read(readout, g)
        return F.linear(self.bare_force(z, self.keys(z, g)), write, field)

    def energy_among(self, z: Tensor, keys: Tensor, kept: Tensor, seen: Seen) -> Tensor:
        """``energy`` of tokens among kept keys, as ``force_among``."""
        raise ValueError(f"{type(self).__name__} has keys but no energy_among(); write it")

    def at_step(self, t: int) -> None:
        """Inference step t begins. For terms that change over the steps, which are few."""

    def guarantee(self) -> Finding:
        """EVERY_STEP for an energy that is concave in z, SMALL_STEPS for any other whose force
        is its exact gradient (which is taken on trust), NONE if it is not."""
        why = "not known to be concave (override guarantee() if it is)"
        return Finding(type(self).__name__, Guarantee.SMALL_STEPS, why)

    def extra_repr(self) -> str:
        by_autograd = type(self).force is EnergyTerm.force
        return "force by autograd: write force() to speed it up" if by_autograd else ""
