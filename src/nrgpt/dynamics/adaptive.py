"""Adaptive computation: as many steps as a token needs.

``loss_against_steps`` measures what stopping early costs on a text. ``stream_adaptive`` generates
text: the prompt takes all steps, and each new token stops when its rule says so. At all further
steps, later tokens see it where it stopped.

>>> import nrgpt, torch
>>> from nrgpt.dynamics.adaptive import loss_against_steps, stream_adaptive
>>> from nrgpt.dynamics.relax import Stop
>>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
>>> model, text = nrgpt.LanguageModel(cfg), torch.randint(65, (2, 33))
>>> rules = [Stop("kl", 1e-3), Stop("kl", 1e-1)]
>>> costs = loss_against_steps(model, text[:, :-1], text[:, 1:], rules)
>>> [cost.mean_steps <= 8 for cost in costs]
[True, True, True]
>>> new_tokens = stream_adaptive(model, [[1, 2, 3], [4]], Stop("argmax"), max_new_tokens=3)
>>> [len(new) for new, taken in new_tokens]
[2, 2, 2]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode.cache import Cache
from ..decode.decoder import Decoder
from ..decode.generate import check_sound
from ..kernels.loss import plain_loss
from ..model.network import Network
from ..model.step import Plan
from .relax import Arrivals, Stop, relax


@dataclass(frozen=True)
class Cost:
    """What a stopping rule costs on a text. ``stop`` is None if all steps are taken."""

    stop: Stop | None
    loss: float
    mean_steps: float
    computed: float
    """Token states computed, per token (rows of a batch wait for their slowest token)."""


@torch.no_grad()
def loss_against_steps(
    model: Network,
    idx: Tensor,
    targets: Tensor,
    stops: Sequence[Stop],
    *,
    steps: int | None = None,
) -> list[Cost]:
    """Loss and mean number of steps: first of all steps, then of each rule."""
    costs = []
    for stop in (None, *stops):
        found = relax(model, idx, steps=steps, stop=stop)
        loss = plain_loss(model.readout(found.x), targets)
        mean = found.steps.float().mean().item()
        costs.append(Cost(stop, loss.item(), mean, found.computed / idx.numel()))
    return costs


def stream_adaptive(
    model: Network,
    prompts: Sequence[Sequence[int]],
    stop: Stop,
    *,
    max_new_tokens: int,
    steps: int | None = None,
) -> Iterator[tuple[list[int], list[int]]]:
    """Greedy generation: the new token of each row, and how many steps the one before it took."""
    model.energy_block  # noqa: B018 (raises for a baseline, which has no energy)
    device = model.tokens.device.type
    with torch.autocast(device, enabled=False):
        decoder = AdaptiveDecoder(model, prompts, stop, steps)
    for _ in range(max_new_tokens):
        with torch.no_grad(), torch.autocast(device, enabled=False):
            logits = decoder.next_logits()
            check_sound(logits.isfinite().all())
            decoder.feed(logits.argmax(-1))
        yield decoder.read(), decoder.taken


class AdaptiveDecoder(Decoder):
    """Rows wait for the slowest one; tokens that have arrived stay where they are."""

    def __init__(
        self, model: Network, prompts: Sequence[Sequence[int]], stop: Stop, steps: int | None
    ):
        super().__init__(model, prompts, "exact", steps)
        self.stop = stop
        self.taken = [self.steps] * len(prompts)
        """Steps that the last token of each row took."""

    def extend(self, idx: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The last states of one new token in each row."""
        plan = self.plans.at(0)
        assert isinstance(plan, Plan)
        x, seen = self.plans.begin(self.model.embed_at(idx, positions), cache)
        arrivals, taken = Arrivals(self.stop, self.readout, idx), torch.zeros_like(idx)
        for t in range(self.steps):
            if not bool(arrivals.going.any()):
                # Nothing moves, but later tokens need the keys of this step (unless all steps share
                # them).
                plan.keep(x, t, cache)
                continue
            look = plan.observe(x, t, seen)
            going = arrivals.update(x, look, t)
            x = torch.where(going.unsqueeze(-1), x + look.update, x)
            taken = torch.where(going, t + 1, taken)
        self.taken = taken[:, 0].tolist()
        return x
