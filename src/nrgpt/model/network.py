"""The network: embed, T steps, head. One loop for NRGPT and every baseline."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels.loss import IGNORED_TARGET as IGNORED_TARGET
from ..kernels.loss import head_loss, plain_loss
from .block import Block, EnergyBlock, Steps
from .candidate import CandidateBlock
from .certificate import Certificate, Finding, Guarantee
from .config import ModelConfig
from .counts import ParameterCounts, count_parameters
from .init import head, initialise, normal, parameter, zeros
from .norm import NoNorm, make_norm
from .past import Memory
from .prelude import Prelude
from .sequence import SequenceBlock
from .step import Extra
from .transformer import ParallelBlock, SequentialBlock


def make_blocks(cfg: ModelConfig) -> nn.ModuleList:
    """The distinct blocks: one for every step of a GPT, a single one for the recurrent models."""
    match cfg.block:
        case "nrgpt":
            return nn.ModuleList([EnergyBlock(cfg)])
        case "gpt":
            return nn.ModuleList(SequentialBlock(cfg) for _ in range(cfg.steps))
        case "rgpt":
            return nn.ModuleList([SequentialBlock(cfg)])
        case "rgpt_parallel":
            return nn.ModuleList([ParallelBlock(cfg)])
        case "et":
            return nn.ModuleList([SequenceBlock(cfg)])
        case "ebt":
            return nn.ModuleList([CandidateBlock(cfg)])


class Plans(NamedTuple):
    """What a forward pass computes once: for the layers of the prelude, and for the blocks."""

    prelude: list[Steps]
    blocks: list[Steps]
    on_sphere: bool

    def at(self, t: int) -> Steps:
        """What takes step t."""
        return self.blocks[t % len(self.blocks)]

    def begin(
        self, x: Tensor, memory: Memory | None = None, masks: Tensor | None = None
    ) -> tuple[Tensor, Memory | None]:
        """From embeddings to the state that the steps start in, and the memory that they see."""
        for i, layer in enumerate(self.prelude):
            own = None if masks is None else masks.chunk(len(self.prelude))[i]
            x = layer.move(x, i - len(self.prelude), memory, own)
        if self.on_sphere:
            x = x * x.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
        return self.blocks[0].begin(x, memory)


MOST_STEPS = 1_000_000
"""More would never end."""


class Network(nn.Module):
    """Token and position embeddings, ``steps`` applications of a block, final norm, head.

    A prelude of ordinary layers may come before the steps.

    nrgpt.LanguageModel is this and what one does with it: generate, watch, certify.
    """

    checkpoint_steps = False
    """Recompute each step in the backward pass instead of keeping it: memory for time."""
    checks_tokens = True
    """Look, on a CPU, whether every token is in the vocabulary."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.tokens = parameter(cfg.vocab_size, cfg.width, start=normal)
        self.positions = parameter(cfg.context, cfg.width, start=normal)
        self.prelude = Prelude(cfg)
        self.blocks = make_blocks(cfg)
        self.final_norm = NoNorm() if self.says_its_state else make_norm(cfg)
        self.head = None if cfg.tied else parameter(cfg.vocab_size, cfg.width, start=head)
        self.head_bias = parameter(cfg.vocab_size, start=zeros) if cfg.head_bias else None
        self.for_muon = initialise(self, cfg)
        """Which parameters Muon may update, by name."""

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        steps: int | None = None,
        extra: Extra | None = None,
        masks: Tensor | None = None,
        dropout: bool | None = None,
        exits: Tensor | None = None,
        want_logits: bool = True,
        last: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits (batch, tokens, vocabulary) and, given targets, their mean cross-entropy.

        ``steps`` may differ from the trained number (for gpt it may only be smaller).
        ``extra`` terms are added to the energy for this call. ``masks`` are dropout's, from
        ``draw_masks``; a model in training mode, or asked for ``dropout``, draws them itself.
        ``exits`` (batch, tokens): a token is read after that many steps, if there are more.
        Training has no use for the logits (``want_logits``): without them a large vocabulary takes
        far less memory. ``last``: only that many tokens at the end have logits and count in the
        loss.
        """
        options: dict[str, Any] = {
            "steps": steps,
            "extra": extra,
            "masks": masks,
            "dropout": dropout,
        }
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)}; they must have that of idx, "
                f"{tuple(idx.shape)}"
            )
        is_training = self.training if dropout is None else dropout
        if self.says_its_state and targets is not None and is_training:
            _, *states = self.states(idx, **options)  # trained on what it says after each step
            losses = [plain_loss(x, targets) for x in states]
            return (states[-1] if want_logits else None), torch.stack(losses).mean()
        x = self.last_state(idx, exits=exits, **options)
        if last is not None:
            if not 1 <= last <= idx.shape[1]:
                raise ValueError(
                    f"last = {last}: must be in 1 .. {idx.shape[1]}, the tokens of idx"
                )
            x, targets = x[:, -last:], None if targets is None else targets[:, -last:]
        if targets is not None and not want_logits and not self.says_its_state:
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
        dropout: bool | None = None,
    ) -> Iterator[Tensor]:
        """x before the first step and after each one, shape (batch, tokens, width)."""
        steps = self.check_steps(steps)
        plans = self.plan(extra)
        x = self.embed(idx)
        dropout = self.training if dropout is None else dropout
        if masks is None and dropout and self.cfg.dropout > 0:
            masks = self.draw_masks(*idx.shape, steps=steps)
        first = 1 + self.prelude.updates
        if masks is not None:
            x = x * masks[0]
        x, memory = plans.begin(x, None, None if masks is None else masks[1:first])
        yield x
        for t in range(steps):
            i, own = t % len(self.blocks), None
            if masks is not None:
                own = masks[first + t * self.updates : first + (t + 1) * self.updates]
            arguments = (x, t, plans.at(t), memory, own)
            if self.checkpoint_steps and torch.is_grad_enabled():
                x = checkpoint(self.blocks[i], *arguments, use_reentrant=False)
            else:
                x = self.blocks[i](*arguments)
            yield x

    def last_state(self, idx: Tensor, *, exits: Tensor | None = None, **options: Any) -> Tensor:
        """x after the last step, or after as many as ``exits`` says, (batch, tokens). The other
        options are those of ``states``."""
        states = self.states(idx, **options)
        read = next(states)
        for t, x in enumerate(states, 1):
            read = x if exits is None else torch.where(exits[..., None] >= t, x, read)
        return read

    def draw_exits(
        self, idx: Tensor, share: float, first: int, *, steps: int | None = None
    ) -> Tensor:
        """When the tokens idx are read: a ``share`` of them at random after ``first`` to steps - 1
        steps, and the others after all."""
        steps = self.cfg.steps if steps is None else steps
        shape, device = idx.shape, self.tokens.device
        if first >= steps:
            return torch.full(shape, steps, device=device)
        early = torch.rand(shape, device=device) < share
        return torch.where(early, torch.randint(first, steps, shape, device=device), steps)

    def draw_masks(self, batch: int, tokens: int, *, steps: int | None = None) -> Tensor:
        """What dropout multiplies the embeddings and then every update with: zeros, and
        1 / (1 - p) to make up for them. Drawn beforehand, so that a run is a function of its seed
        alone, whatever it is computed with."""
        steps = self.cfg.steps if steps is None else steps
        number = 1 + self.prelude.updates + steps * self.updates
        p = self.cfg.dropout
        kept = torch.rand(number, batch, tokens, self.cfg.width, device=self.tokens.device) >= p
        return kept.to(self.tokens.dtype) / (1 - p)

    @property
    def updates(self) -> int:
        """How many updates a block makes, one after the other."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        return block.updates

    def plan(self, extra: Extra | None = None, *, stacked: bool = False) -> Plans:
        """What the prelude and the blocks compute once; ``stacked`` for decoding."""
        blocks = [block.plan(extra, stacked=stacked) for block in self.blocks]  # type: ignore[operator]
        return Plans(self.prelude.plan(self.blocks[0], extra), blocks, self.is_on_sphere)

    @property
    def says_its_state(self) -> bool:
        """Whether states are logits, those of candidates, and there is no head."""
        return self.cfg.block == "ebt"

    @property
    def is_watched(self) -> bool:
        """Whether its states, or candidates, have energies to look at."""
        return self.cfg.has_energy or self.says_its_state

    def check_continues(self, what: str) -> None:
        """Refuse what is for models that continue texts token by token, with a cache."""
        if self.cfg.block in ("et", "ebt"):
            why = {"et": "completes texts, and continues none", "ebt": "has no cache"}
            raise ValueError(
                f"{what}: a model with block = {self.cfg.block!r} {why[self.cfg.block]}"
            )

    @property
    def is_settled(self) -> bool:
        return self.cfg.past == "settled" and self.cfg.block == "nrgpt"

    @property
    def is_on_sphere(self) -> bool:
        return self.cfg.start == "sphere" and self.cfg.block == "nrgpt"

    def begin(self, idx: Tensor, extra: Extra | None = None) -> Tensor:
        """The state that the steps start in, without dropout."""
        return self.plan(extra).begin(self.embed(idx))[0]

    def extend(
        self,
        idx: Tensor,
        positions: Tensor,
        plans: Plans,
        memory: Memory,
        *,
        steps: int | None = None,
    ) -> Tensor:
        """The last states of tokens that see earlier ones through the keys in ``memory``. Nothing
        is checked here: this is called for every token of a text."""
        x = F.embedding(idx, self.tokens) + F.embedding(positions, self.positions)
        x, seen = plans.begin(x, memory)
        blocks = plans.blocks
        for t in range(self.cfg.steps if steps is None else steps):
            x = blocks[t % len(blocks)].move(x, t, seen)
        return x

    def embed(self, idx: Tensor) -> Tensor:
        """Token and position embeddings."""
        self.check_tokens(idx)
        return F.embedding(idx, self.tokens) + self.positions[: idx.shape[1]]

    def embed_at(self, idx: Tensor, positions: Tensor) -> Tensor:
        """The same at any positions, unchecked."""
        return F.embedding(idx, self.tokens) + F.embedding(positions, self.positions)

    def check_tokens(self, idx: Tensor) -> None:
        """A clear error for what cannot be embedded."""
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

    def check_vocabulary(self, idx: Tensor) -> None:
        """A clear error for a stray token. (On a GPU, looking would make it wait.)"""
        low, high = (int(v) for v in idx.aminmax()) if idx.numel() else (0, 0)
        if low < 0 or high >= self.cfg.vocab_size:
            raise ValueError(
                f"idx holds token {low if low < 0 else high}, and the vocabulary ends at "
                f"{self.cfg.vocab_size - 1}"
            )

    def readout(self, x: Tensor) -> Tensor:
        """Logits of a state: what the model would say if it stopped here. (By the head; a term's
        readout is something else.)"""
        return self.reader()(x)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """``readout`` as a function, with the present weights, for repeated use."""
        if self.says_its_state:
            return lambda x: x
        normalise, weight, bias = self.final_norm.function(), self.head_weight, self.head_bias
        return lambda x: F.linear(normalise(x), weight, bias)

    @property
    def head_weight(self) -> Tensor:
        return self.tokens if self.head is None else self.head

    def check_steps(self, steps: int | None) -> int:
        if steps is None:
            return self.cfg.steps
        is_number = isinstance(steps, int) and not isinstance(steps, bool)
        if not is_number or not 1 <= steps <= MOST_STEPS:
            must_be = f"a whole number, at least 1 and at most {MOST_STEPS:,}"
            raise ValueError(f"steps = {steps!r}: must be {must_be}")
        if self.cfg.block == "gpt" and steps > self.cfg.steps:
            raise ValueError(
                f"steps = {steps!r}: must be at most {self.cfg.steps}, the number of distinct "
                "blocks of this gpt; only recurrent models can take more steps than trained"
            )
        return steps

    @property
    def energy_block(self) -> EnergyBlock:
        block = self.blocks[0]
        if not isinstance(block, EnergyBlock):
            raise ValueError(
                f"block = {self.cfg.block!r} has no energy of a token's state; block = 'nrgpt' has"
            )
        return block

    def energies(
        self, x: Tensor, extra: Extra | None = None, *, start: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Each named term's energy of each token in state x, shape (batch, tokens). With a settled
        past they depend on the ``start`` of the steps too, the first of the model's ``states``."""
        plan = self.energy_block.plan(extra)
        if plan.settled and start is None:
            raise ValueError("start: with past = 'settled', pass the first of the model's states()")
        with torch.autocast(x.device.type, enabled=False):  # as energies are
            seen = plan.settle(start) if plan.settled and start is not None else None
        return plan.energies(x, memory=seen)

    def guarantees(self, extra: Extra | None = None) -> Certificate:
        """Is descent guaranteed, at the present weights? If not, which part is to blame?"""
        if not self.cfg.has_energy and not extra:
            why = "a transformer block is not the gradient of an energy"
            if self.cfg.block == "ebt":
                why = "its energy is a transformer's output, and steps down it may be too large"
            return Certificate((Finding(f"block {self.cfg.block}", Guarantee.NONE, why),))
        return self.energy_block.guarantees(extra)

    def parameter_counts(self) -> ParameterCounts:
        return count_parameters(self.named_parameters(), self.tokens.numel(), tied=self.cfg.tied)
