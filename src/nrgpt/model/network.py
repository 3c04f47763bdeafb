"""The language model: embed, T steps, read out. One loop for NRGPT and every baseline."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..decode.cache import Cache
from ..kernels.loss import IGNORED_TARGET as IGNORED_TARGET
from ..kernels.loss import head_loss, plain_loss
from .block import EnergyBlock, make_blocks
from .certificate import Certificate, Finding, Guarantee
from .config import ModelConfig
from .energy.total import Extra
from .init import blank, initialise
from .norm import make_norm


@dataclass(frozen=True)
class ParameterCounts:
    """Trainable parameters. ``groups`` sum to ``total``, which is ``tied`` or ``untied``: the
    counts with and without sharing the token embedding with the head."""

    groups: dict[str, int]
    total: int
    tied: int
    untied: int


class LanguageModel(nn.Module):
    """Token and position embeddings, ``steps`` applications of a block, final norm, head."""

    checkpoint_steps = False
    """Recompute each step in the backward pass instead of keeping it: memory for time."""
    checks_tokens = True
    """Look, on a CPU, whether every token is in the vocabulary."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.tokens = blank(cfg.vocab_size, cfg.width)
        self.positions = blank(cfg.context, cfg.width)
        self.blocks = make_blocks(cfg)
        self.final_norm = make_norm(cfg)
        self.head = None if cfg.tied else blank(cfg.vocab_size, cfg.width)
        self.head_bias = blank(cfg.vocab_size) if cfg.head_bias else None
        initialise(self, cfg)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        steps: int | None = None,
        extra: Extra | None = None,
        masks: Tensor | None = None,
        want_logits: bool = True,
        last: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits (batch, tokens, vocabulary) and, given targets, their mean cross-entropy.

        ``steps`` may differ from the trained number (for gpt it may only be smaller).
        ``extra`` terms are added to the energy for this call. ``masks`` are dropout's, from
        ``draw_masks``; a model in training mode draws them itself. A training step has no use for
        the logits: without them (None) a large vocabulary takes far less memory. ``last``: logits
        and cross-entropy of the last so many tokens only.
        """
        for x in self.states(idx, steps=steps, extra=extra, masks=masks):  # noqa: B007
            pass  # the last one counts
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)}; they must have that of idx, "
                f"{tuple(idx.shape)}"
            )
        if last is not None:
            if not 1 <= last <= idx.shape[1]:
                raise ValueError(
                    f"last = {last}: must be in 1 .. {idx.shape[1]}, the tokens of idx"
                )
            x, targets = x[:, -last:], None if targets is None else targets[:, -last:]
        if targets is not None and not want_logits:
            return None, head_loss(self.final_norm(x), self.head_weight, self.head_bias, targets)
        logits = self.readout(x)
        return logits, None if targets is None else plain_loss(logits, targets)

    def states(
        self,
        idx: Tensor,
        *,
        steps: int | None = None,
        extra: Extra | None = None,
        masks: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """x before the first step and after each one, shape (batch, tokens, width)."""
        steps = self.check_steps(steps)
        prepared = self.prepare(extra)
        x = self.embed(idx)
        if masks is None and self.training and self.cfg.dropout > 0:
            masks = self.draw_masks(*idx.shape, steps=steps)
        if masks is not None:
            x = x * masks[0]
        yield x
        for t in range(steps):
            i = t % len(self.blocks)
            arguments = (x, t, prepared[i], None if masks is None else self.masks_at(masks, t))
            if self.checkpoint_steps and torch.is_grad_enabled():
                x = checkpoint(self.blocks[i], *arguments, use_reentrant=False)
            else:
                x = self.blocks[i](*arguments)
            yield x

    def draw_masks(self, batch: int, tokens: int, *, steps: int | None = None) -> Tensor:
        """What dropout multiplies the embeddings and then every update with: zeros, and
        1 / (1 - p) to make up for them. Drawn beforehand, so that a run is a function of its seed
        alone, whatever it is computed with."""
        number = 1 + (self.cfg.steps if steps is None else steps) * self.updates
        p = self.cfg.dropout
        kept = torch.rand(number, batch, tokens, self.cfg.width, device=self.tokens.device) >= p
        return kept.to(self.tokens.dtype) / (1 - p)

    def masks_at(self, masks: Tensor, t: int) -> Tensor:
        first = 1 + t * self.updates
        return masks[first : first + self.updates]

    @property
    def updates(self) -> int:
        """How many updates a block makes, one after the other."""
        return self.blocks[0].updates  # type: ignore[return-value]

    def prepare(self, extra: Extra | None = None) -> list[Any]:
        """What each block computes once for all of its steps."""
        return [block.prepare(extra) for block in self.blocks]  # type: ignore[operator]

    def extend(
        self,
        idx: Tensor,
        cache: Cache,
        prepared: list[Any],
        *,
        steps: int | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The last states of tokens that follow those in the cache; their keys go into it.
        ``cache.end`` must follow, unless their ``positions`` are given (see Cache.begin_at)."""
        steps = self.check_steps(steps)
        if cache.frozen and self.cfg.block == "gpt":
            raise ValueError("a frozen cache is for recurrent models: a gpt's blocks differ")
        if positions is None:
            rows, tokens = idx.shape
            cache.begin(rows, tokens, idx.device)
        else:
            cache.begin_at(positions)
        x = self.embed(idx, cache.positions())
        for t in range(steps):
            i = t % len(self.blocks)
            x = self.blocks[i](x, t, prepared[i], None, cache)
        if cache.frozen:
            self.blocks[0].keep(x, 0, prepared[0], cache)  # type: ignore[operator]
        return x

    def embed(self, idx: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token and position embeddings; positions are 0, 1, ... unless given, (batch, tokens)."""
        if idx.dim() != 2:
            raise ValueError(f"idx has shape {tuple(idx.shape)}; it must be (batch, tokens)")
        if not 1 <= idx.shape[1] <= self.cfg.context:
            raise ValueError(
                f"idx has {idx.shape[1]} tokens; this model takes 1 to context = {self.cfg.context}"
            )
        if idx.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"idx is of type {idx.dtype}; it must be int64 or int32")
        looks = self.checks_tokens and idx.device.type == "cpu"
        if looks and not torch.compiler.is_compiling():
            self.check_vocabulary(idx)
        if positions is None:
            where = self.positions[: idx.shape[1]]
        else:
            where = F.embedding(positions, self.positions)
        return F.embedding(idx, self.tokens) + where

    def check_vocabulary(self, idx: Tensor) -> None:
        """A clear error for a stray token. (On a GPU, looking would make it wait.)"""
        low, high = (int(v) for v in idx.aminmax()) if idx.numel() else (0, 0)
        if low < 0 or high >= self.cfg.vocab_size:
            raise ValueError(
                f"idx holds token {low if low < 0 else high}, and the vocabulary ends at "
                f"{self.cfg.vocab_size - 1}"
            )

    def readout(self, x: Tensor) -> Tensor:
        """Logits of a state: what the model would say if it stopped here."""
        return F.linear(self.final_norm(x), self.head_weight, self.head_bias)

    @property
    def head_weight(self) -> Tensor:
        return self.tokens if self.head is None else self.head

    def check_steps(self, steps: int | None) -> int:
        if steps is None:
            return self.cfg.steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps = {steps!r}: must be a whole number, at least 1")
        if self.cfg.block == "gpt" and steps > self.cfg.steps:
            raise ValueError(
                f"steps = {steps!r}: must be at most {self.cfg.steps}, the number of distinct "
                "blocks of this gpt; only recurrent models can take more steps than trained"
            )
        return steps

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """The new tokens of each prompt; see nrgpt.decode.generate.generate for the options."""
        from ..decode.generate import generate

        return generate(self, prompts, **options)

    @property
    def energy_block(self) -> EnergyBlock:
        block = self.blocks[0]
        if not isinstance(block, EnergyBlock):
            raise ValueError(f"block = {self.cfg.block!r} has no energy; block = 'nrgpt' has")
        return block

    def energies(self, x: Tensor, extra: Extra | None = None) -> dict[str, Tensor]:
        """Each named term's energy of each token in state x, shape (batch, tokens)."""
        block = self.energy_block
        return block.energy.energies(block.norm(x), extra)

    def certificate(
        self, extra: Extra | None = None, *, idx: Tensor | None = None, steps: int | None = None
    ) -> Certificate:
        """Is descent guaranteed, at the present weights? If not, which part is to blame? Given
        tokens ``idx``, their energies are followed too, with a frozen past and in parallel."""
        if self.cfg.block != "nrgpt" and not extra:
            why = "a transformer block is not the gradient of an energy"
            return Certificate((Finding(f"block {self.cfg.block}", Guarantee.NONE, why),))
        block = self.energy_block
        terms = [term.guarantee() for _, term in block.energy.named_terms(extra)]
        findings = (*terms, block.rate.guarantee(block.norm))
        if idx is None:
            return Certificate(findings)
        from ..dynamics.descent import check_descent

        return Certificate(findings, check_descent(self, idx, steps=steps, extra=extra))

    def parameter_counts(self) -> ParameterCounts:
        groups: Counter[str] = Counter()
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                groups[group_of(name)] += parameter.numel()
        total = sum(groups.values())
        if self.cfg.tied:
            return ParameterCounts(dict(groups), total, total, total + self.tokens.numel())
        return ParameterCounts(dict(groups), total, total - self.tokens.numel(), total)


def group_of(parameter: str) -> str:
    """blocks.3.attention.W_Q -> attention; head_bias -> head; final_norm.gamma -> final_norm."""
    parts = [p for p in parameter.split(".") if p not in ("blocks", "energy", "terms")]
    group = next(p for p in parts if not p.isdigit())
    return {"head_bias": "head", "norm_1": "norm", "norm_2": "norm"}.get(group, group)
