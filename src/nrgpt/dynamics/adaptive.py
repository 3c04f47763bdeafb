"""Adaptive computation: as many steps as a token needs.

``loss_against_steps`` measures what stopping early costs on a text. ``stream_adaptive`` generates
with it: the prompt is computed as trained, then each new token stops when its rule says so, and
later tokens see it where it rests for all further steps.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decode.cache import Cache
from ..decode.decoder import Decoder
from ..decode.generate import evaluating
from ..model.block import Etas
from ..model.network import IGNORED_TARGET, LanguageModel
from .field import look_among
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
    model: LanguageModel,
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
    model: LanguageModel,
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
        with torch.no_grad(), evaluating(model):
            decoder.feed(decoder.next_logits().argmax(-1))
        yield decoder.read(), decoder.taken


class AdaptiveDecoder(Decoder):
    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        stop: Stop,
        steps: int | None,
    ):
        super().__init__(model, prompts, "exact", steps, None)
        self.stop = stop
        self.taken = [model.check_steps(steps)] * len(prompts)

    def extend(self, idx: Tensor, cache: Cache) -> Tensor:
        x, taken = extend_adaptively(self.model, idx, cache, self.stop, self.steps)
        self.taken = taken[:, 0].tolist()
        return x


def extend_adaptively(
    model: LanguageModel, idx: Tensor, cache: Cache, stop: Stop, steps: int | None
) -> tuple[Tensor, Tensor]:
    """``model.extend`` for one new token in each row of a cache that has tokens already. Rows wait
    for the slowest; those that have arrived stay where they are."""
    steps = model.check_steps(steps)
    block = model.energy_block
    prepared = block.prepare()
    terms = [(folded.term, folded.readout) for folded in prepared]
    etas = Etas(block, [name for name, _ in block.energy.named_terms()])
    rows, tokens = idx.shape
    cache.begin(rows, tokens, idx.device)
    assert cache.seen is not None
    x = model.embed(idx, cache.positions())
    arrived = torch.zeros_like(idx, dtype=torch.bool)
    held, taken = torch.zeros_like(idx), torch.zeros_like(idx)
    before: Sight | None = None
    for t in range(steps):
        if bool(arrived.all()):  # nobody moves any more: only the keys of later steps are missing
            block.keep(x, t, prepared, cache)
            continue
        put = functools.partial(cache.put, t)
        look = look_among(terms, etas, block.norm(x), put, cache.seen)
        log_p = model.readout(x).log_softmax(-1) if stop.reads_out else None
        now = Sight(look, log_p)
        held = torch.where(stop.holds(before, now), held + 1, 0)
        arrived = arrived | ((held >= stop.patience) & (t >= stop.minimum))
        update = block.rate.apply_step(look.push, t, x, block.norm)
        x = torch.where(arrived.unsqueeze(-1), x, x + update)
        taken = torch.where(arrived, taken, t + 1)
        before = now
    return x, taken
