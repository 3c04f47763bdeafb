"""Adaptive computation: as many steps as a token needs.

``loss_against_steps`` measures what stopping early costs on a text. ``stream_adaptive`` generates
with it: the prompt is computed as trained, then each new token stops when its rule says so, and
later tokens see it where it rests for all further steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decode.cache import Cache
from ..decode.decoder import Decoder
from ..model.network import IGNORED_TARGET, Network
from .relax import Sight, Stop, relax


@dataclass(frozen=True)
class Cost:
    """What a stopping rule costs on a text; ``stop`` is None for all steps."""

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
    """Loss and mean number of steps for all steps, and for each rule.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.adaptive import loss_against_steps
    >>> from nrgpt.dynamics.relax import Stop
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
    >>> text = torch.randint(65, (2, 33))
    >>> rules = [Stop("kl", 1e-3), Stop("kl", 1e-1)]
    >>> costs = loss_against_steps(nrgpt.LanguageModel(cfg), text[:, :-1], text[:, 1:], rules)
    >>> [cost.mean_steps <= 8 for cost in costs]
    [True, True, True]
    """
    costs = []
    for stop in (None, *stops):
        found = relax(model, idx, steps=steps, stop=stop)
        logits = model.readout(found.x).float()
        loss = F.cross_entropy(logits.mT, targets, ignore_index=IGNORED_TARGET)
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
    """Greedy generation: the new token of each row, and how many steps the one before it took.

    >>> import nrgpt
    >>> from nrgpt.dynamics.adaptive import stream_adaptive
    >>> from nrgpt.dynamics.relax import Stop
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
    >>> model = nrgpt.LanguageModel(cfg)
    >>> [len(new) for new, taken in stream_adaptive(
    ...     model, [[1, 2, 3], [4]], Stop("argmax"), max_new_tokens=3)]
    [2, 2, 2]
    """
    model.energy_block  # noqa: B018 (a baseline says here that it has no energy)
    decoder = AdaptiveDecoder(model, prompts, stop, steps)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            decoder.feed(decoder.next_logits().argmax(-1))
        yield decoder.read(), decoder.taken


class AdaptiveDecoder(Decoder):
    """Rows wait for the slowest; those that have arrived stay where they are."""

    def __init__(
        self, model: Network, prompts: Sequence[Sequence[int]], stop: Stop, steps: int | None
    ):
        super().__init__(model, prompts, "exact", steps)
        self.stop = stop
        self.taken = [self.steps] * len(prompts)

    def extend(self, idx: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """For one new token in each row of a cache that has tokens already."""
        model, stop = self.model, self.stop
        plan = model.energy_block.plan()
        x = model.extend(idx, positions, [], cache, steps=0)
        arrived = torch.zeros_like(idx, dtype=torch.bool)
        held, taken = torch.zeros_like(idx), torch.zeros_like(idx)
        before: Sight | None = None
        for t in range(self.steps):
            if bool(arrived.all()):  # nobody moves any more: only keys of later steps are missing
                plan.keep(x, t, cache)
                continue
            look = plan.observe(x, t, cache)
            now = Sight(look, self.readout(x).log_softmax(-1) if stop.reads_out else None)
            held = torch.where(stop.holds(before, now), held + 1, 0)
            arrived = arrived | ((held >= stop.patience) & (t >= stop.minimum))
            x = torch.where(arrived.unsqueeze(-1), x, x + look.update)
            taken = torch.where(arrived, taken, t + 1)
            before = now
        self.taken = taken[:, 0].tolist()
        return x
