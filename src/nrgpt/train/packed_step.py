"""One update of many models of one shape at once.

Weights, gradients and optimiser states of P runs are stacked, (P, ...), and both passes are batched
over them: one batched matrix product takes the place of P small ones, and one kernel launch that of
P. Since only the batching differs, each run equals the same run trained alone up to rounding (with
Muon, that of bfloat16).

Nothing here waits for the device, so an update can be recorded as one CUDA graph and replayed.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.dispatch import packed
from ..kernels.graph import Graphed
from ..language_model import LanguageModel
from .config import OptimiserConfig
from .optim import names_for_muon
from .packed_optim import PackedOptimiser
from .speed import compile_model, forget_compiled

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's: compiled under vmap, it seems to have an output that it does not have."""

TOLERANCE = 0.01
"""The relative error that a compiled gradient may have even if the plain one is exact."""

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"comprehensive_padding": False}
"""If the compiler pads rows, torch 2.11 mixes up numbers on a GPU where a weight (P, n) of several
runs is viewed as (P, rows, columns) and n is not a multiple of 32."""

Precision = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which models compute."""


class PackedStep:
    """``step(x, y, masks, exits, rates)`` updates all runs; x, y, exits: (P, batch, tokens), rates:
    (P,).

    ``compile`` fuses the operations between matrix products. ``graph`` records all that an update
    does on a GPU and replays it, which saves most of the time of small models.
    """

    def __init__(
        self,
        models: Sequence[LanguageModel],
        optimisers: Sequence[OptimiserConfig],
        *,
        precision: Precision = nullcontext,
        compile: bool = False,
        graph: bool = False,
    ):
        self.model, self.precision = models[0], precision
        self.model.checks_tokens = False  # vmap allows no look at values
        named = [model.state_dict(keep_vars=True) for model in models]
        learned = {name: p for name, p in named[0].items() if p.requires_grad}
        stacked = {name: torch.stack([own[name].detach() for own in named]) for name in named[0]}
        by_muon = names_for_muon(self.model, optimisers[0])
        own = {name: stacked[name] for name in learned}
        self.optimiser = PackedOptimiser(own, by_muon, optimisers)
        self.weights = stacked | self.optimiser.weights
        self.leaves: list[Tensor] = list(self.optimiser.weights.values())
        """The tensors that gradients are taken with respect to."""
        self.losses: Callable[..., Tensor] = self.losses_of_all
        if len(models) == 1:
            self.losses = self.loss_of_one
            self.leaves = [learned[name] for name in self.optimiser.weights]
            for name, value in self.weights.items():  # put the model's own weights in the buffer
                named[0][name].data = value[0].detach()
        self.optimise: Callable[..., Tensor] = self.optimiser.step
        self.is_proven = not compile or len(models) == 1
        if compile:
            if len(models) > 1:
                forget_compiled()
                self.losses = torch.compile(self.losses, dynamic=False, options=OPTIONS)
            else:
                compile_model(self.model)
            self.optimise = torch.compile(self.optimise, dynamic=False, options=OPTIONS)
        self.updated: Callable[..., tuple[Tensor, Tensor]] = self.update
        self.estimated: Callable[..., Tensor] = self.estimate
        if graph:
            self.updated, self.estimated = Graphed(self.update), Graphed(self.estimate)

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        masks: Tensor | None,
        exits: Tensor | None,
        rates: Tensor,
        *,
        steps: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Losses (P,), and which runs were updated: one whose loss or gradient is not finite stays
        as it is."""
        self.model.train()
        if not self.is_proven:
            self.prove(x, y, masks, exits, steps)
        return self.updated(x, y, masks, exits, rates, steps)

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """Losses (P,) without dropout."""
        self.model.eval()
        return self.estimated(x, y)

    @torch.no_grad()
    def estimate(self, x: Tensor, y: Tensor) -> Tensor:
        with self.computing():
            return self.losses(x, y, None, None, None)

    def update(
        self,
        x: Tensor,
        y: Tensor,
        masks: Tensor | None,
        exits: Tensor | None,
        rates: Tensor,
        steps: int | None,
    ) -> tuple[Tensor, Tensor]:
        with self.computing():
            losses = self.losses(x, y, masks, exits, steps)
        gradients = torch.autograd.grad(losses.sum(), self.leaves)
        weights = self.optimiser.weights.values()
        shaped = [g.view_as(w) for g, w in zip(gradients, weights, strict=True)]
        losses = losses.detach()
        return losses, self.optimise(self.optimiser.flat.joined(shaped), losses, rates)

    def prove(
        self,
        x: Tensor,
        y: Tensor,
        masks: Tensor | None,
        exits: Tensor | None,
        steps: int | None,
    ) -> None:
        """Give up compilation if it gets the gradients wrong. (torch 2.11 does with a rate for each
        step, and trained a worse model without a warning.) Compiled gradients must be about as
        close to those of float32 as gradients that are not compiled."""

        def gradients(losses: Callable[..., Tensor], precision: Precision) -> tuple[Tensor, ...]:
            with self.computing(precision):
                return torch.autograd.grad(losses(x, y, masks, exits, steps).sum(), self.leaves)

        truth = gradients(self.losses_of_all, nullcontext)
        plain = gradients(self.losses_of_all, self.precision)
        found = gradients(self.losses, self.precision)
        for name, *three in zip(self.optimiser.weights, truth, plain, found, strict=True):
            exact, *others = (gradient.double() for gradient in three)
            size = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
            usual, error = (((other - exact).norm() / size).item() for other in others)
            if not error <= 2 * usual + TOLERANCE:
                warnings.warn(
                    f"compiled, the gradient of {name} is off by {error:.1%} (not compiled: "
                    f"{usual:.1%}); these runs go on without compilation, more slowly",
                    stacklevel=2,
                )
                self.losses = self.losses_of_all
                break
        self.is_proven = True

    def loss_of_one(
        self,
        x: Tensor,
        y: Tensor,
        masks: Tensor | None,
        exits: Tensor | None,
        steps: int | None,
    ) -> Tensor:
        masks, exits = (None if drawn is None else drawn[0] for drawn in (masks, exits))
        options = {"masks": masks, "exits": exits, "steps": steps}
        _, loss = self.model(x[0], y[0], want_logits=False, **options)
        return loss[None]

    def losses_of_all(
        self,
        x: Tensor,
        y: Tensor,
        masks: Tensor | None,
        exits: Tensor | None,
        steps: int | None,
    ) -> Tensor:
        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor, *drawn: Tensor | None) -> Tensor:
            masks, exits = drawn
            options = {"masks": masks, "exits": exits, "steps": steps}
            return functional_call(self.model, weights, (x, y), options)[1]

        dims = (0, 0, 0, *(None if drawn is None else 0 for drawn in (masks, exits)))
        return vmap(loss, in_dims=dims)(self.weights, x, y, masks, exits)

    @contextmanager
    def computing(self, precision: Precision | None = None) -> Iterator[None]:
        """Compute in this precision and, if there are several runs, with what vmap supports."""
        with ExitStack() as stack:
            stack.enter_context((precision or self.precision)())
            if len(self.optimiser.lr) > 1:
                stack.enter_context(packed())
                stack.enter_context(sdpa_kernel(BACKENDS))
            yield
