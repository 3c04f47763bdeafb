"""What becomes of every token over the steps: its energies, its force, how far it moves, and what
the model would say if it stopped there.

Watching energies costs little more than the forward pass: g, what the terms read and the keys of a
step serve its energies, its forces and the next state alike. What the model would say is dearer
where the vocabulary is large: a whole readout at every step, which ``readouts=False`` leaves out.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.block import Steps
from ..model.network import IGNORED_TARGET, Network
from ..model.step import Extra

LOGITS_AT_ONCE = 1 << 22
"""Logits held at a time: read out for all tokens at once, a large vocabulary would need more memory
than all the rest."""
SAID = ("entropy", "loss", "top_tokens", "top_probabilities")
"""The fields of ``Step`` that need a readout."""
NOTHING_SAID: dict[str, Tensor | None] = dict.fromkeys(SAID)


@dataclass(frozen=True)
class Step:
    """All tokens in one state. Tensors are on the CPU, of shape (batch, tokens) unless noted."""

    t: int
    energies: dict[str, Tensor]
    """By term, and their sum as ``total``; empty if energies were not asked for."""
    force: Tensor | None
    """||dE_A/dg_A||, the norm of all terms' summed force; None without energies."""
    size: Tensor
    """||x||"""
    move: Tensor | None
    """||g - g before||; None in the first state. (Baselines: g as the readout sees it.)"""
    entropy: Tensor | None
    """Of the readout, in nats. This and all below: None without readouts."""
    loss: Tensor | None
    """Of the readout, in nats; None without targets, not a number where a target is ignored."""
    top_tokens: Tensor | None
    """The likeliest tokens of the readout, best first: (batch, tokens, top)."""
    top_probabilities: Tensor | None


@dataclass(frozen=True)
class Trajectory:
    """The fields of ``Step`` with the states 0..T as first dimension: (T + 1, batch, tokens).
    ``move`` has T entries, one for each pair of consecutive states."""

    idx: Tensor
    targets: Tensor | None
    trained_steps: int
    energies: dict[str, Tensor]
    force: Tensor | None
    size: Tensor
    move: Tensor
    entropy: Tensor | None
    loss: Tensor | None
    top_tokens: Tensor | None
    top_probabilities: Tensor | None

    @property
    def steps(self) -> int:
        return len(self.size) - 1

    @property
    def argmax(self) -> Tensor:
        """What the model would say, stopped at each state: (T + 1, batch, tokens)."""
        return self.said()[0][..., 0]

    def said(self) -> tuple[Tensor, Tensor]:
        """The likeliest tokens at each state, and their probabilities: (T + 1, batch, tokens,
        top)."""
        if self.top_tokens is None or self.top_probabilities is None:
            raise ValueError("nothing was read out: this trajectory was made with readouts=False")
        return self.top_tokens, self.top_probabilities

    def mean_loss(self) -> Tensor:
        """Over all tokens that have a target, for each state: (T + 1,)."""
        if self.loss is None:
            raise ValueError("no loss without targets; pass them to trajectory()")
        return self.loss.flatten(1).nanmean(1)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything by name, as np.savez takes it; energies are called energy_NAME."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        tensors |= {f"energy_{name}": energy for name, energy in self.energies.items()}
        arrays = {
            name: (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()  # NumPy has no bfloat16
        }
        return arrays | {"trained_steps": np.array(self.trained_steps)}

    def save(self, path: Path, names: Collection[str] | None = None) -> None:
        """Write the arrays, or those of these names, as np.load reads them."""
        kept = {n: array for n, array in self.arrays().items() if names is None or n in names}
        np.savez_compressed(path, **kept)  # type: ignore[arg-type]  # allow_pickle is no array


def trajectory(
    model: Network,
    idx: Tensor,
    targets: Tensor | None = None,
    steps: int | None = None,
    extra: Extra | None = None,
    *,
    energies: bool = True,
    readouts: bool = True,
    top: int = 1,
) -> Trajectory:
    """Watch the tokens ``idx`` (batch, tokens) over all states of the forward pass.

    ``steps`` and ``extra`` are those of the model's forward pass; ``top`` is how many of the
    likeliest tokens to keep. A baseline has no energy: ``energies=False`` watches the rest.
    ``readouts=False`` leaves out what the model would say (and its loss), which costs a product
    with the whole vocabulary at every state.
    Dropout is off, and everything is computed in the precision of the weights, autocast or not: a
    step may change an energy by little.

    >>> import nrgpt, torch
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
    >>> text = torch.randint(65, (2, 33))
    >>> seen = nrgpt.trajectory(nrgpt.LanguageModel(cfg), text[:, :-1], text[:, 1:], steps=12)
    >>> sorted(seen.energies)
    ['attention', 'feedforward', 'total']
    >>> seen.energies["total"].shape  # states, batch, tokens
    torch.Size([13, 2, 32])
    >>> seen.mean_loss().shape  # if stopped after 0, 1, ... steps
    torch.Size([13])
    """
    records = list(
        stream_trajectory(
            model, idx, targets, steps, extra, energies=energies, readouts=readouts, top=top
        )
    )
    return Trajectory(
        idx=idx.detach().cpu(),
        targets=None if targets is None else targets.detach().cpu(),
        trained_steps=model.cfg.steps,
        energies={
            name: torch.stack([record.energies[name] for record in records])
            for name in records[0].energies
        },
        force=stacked([record.force for record in records]),
        size=torch.stack([record.size for record in records]),
        move=torch.stack([record.move for record in records if record.move is not None]),
        entropy=stacked([record.entropy for record in records]),
        loss=stacked([record.loss for record in records]),
        top_tokens=stacked([record.top_tokens for record in records]),
        top_probabilities=stacked([record.top_probabilities for record in records]),
    )


def stacked(values: list[Tensor | None]) -> Tensor | None:
    """All are there, or none."""
    there = [value for value in values if value is not None]
    return torch.stack(there) if there else None


def stream_trajectory(
    model: Network,
    idx: Tensor,
    targets: Tensor | None = None,
    steps: int | None = None,
    extra: Extra | None = None,
    *,
    energies: bool = True,
    readouts: bool = True,
    top: int = 1,
) -> Iterator[Step]:
    """``trajectory`` one state at a time, for runs too long to keep or that may be stopped.

    >>> import itertools, nrgpt, torch
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
    >>> idx = torch.randint(65, (2, 32))
    >>> states = nrgpt.stream_trajectory(nrgpt.LanguageModel(cfg), idx, steps=10**6)
    >>> [state.t for state in itertools.islice(states, 3)]
    [0, 1, 2]
    """
    steps = model.check_steps(steps)
    if energies:
        _ = model.energy_block  # a baseline says here that it has none
    if targets is not None and targets.shape != idx.shape:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}; they must have that of idx, "
            f"{tuple(idx.shape)}"
        )
    if targets is not None and not readouts:
        raise ValueError("targets are for the loss, which readouts=False leaves out")
    if "total" in (extra or {}):
        raise ValueError("extra term 'total': that is the name of the sum; rename it")
    if not 1 <= top <= model.cfg.vocab_size:
        raise ValueError(f"top = {top}: must be in 1 .. vocab_size = {model.cfg.vocab_size}")
    return watch(model, idx, targets, steps, extra, energies, top if readouts else 0)


@torch.no_grad()
def watch(
    model: Network,
    idx: Tensor,
    targets: Tensor | None,
    steps: int,
    extra: Extra | None,
    energies: bool,
    top: int,
) -> Iterator[Step]:
    """``top`` = 0 reads nothing out."""
    look = look_at_energies if energies else look_at_states
    with precisely(model):
        plans = model.plan(extra)
        x, g_before = model.embed(idx), None
    for t in range(steps + 1):
        with precisely(model):  # not while the caller has a state
            g, found, force, after = look(model, plans[t % len(plans)], x, t)
            said = read_out(model, x, targets, top) if top else NOTHING_SAID
            record = Step(
                t=t,
                energies={name: energy.cpu() for name, energy in found.items()},
                force=None if force is None else force.norm(dim=-1).cpu(),
                size=x.norm(dim=-1).cpu(),
                move=None if g_before is None else (g - g_before).norm(dim=-1).cpu(),
                **{name: None if value is None else value.cpu() for name, value in said.items()},
            )
            x, g_before = after() if t < steps else x, g
        yield record


def precisely(model: Network) -> torch.autocast:
    return torch.autocast(model.tokens.device.type, enabled=False)


Looked = tuple[Tensor, dict[str, Tensor], Tensor | None, Callable[[], Tensor]]
"""g, energies with their total first, the force on g, and how to get to the next state."""


def look_at_energies(model: Network, plan: Any, x: Tensor, t: int) -> Looked:
    seen = plan.observe(x, t)
    return seen.g, {"total": seen.energy, **seen.energies}, seen.force, lambda: x + seen.update


def look_at_states(model: Network, plan: Steps, x: Tensor, t: int) -> Looked:
    """Of any model. A baseline's g is what its head reads."""
    norm = model.energy_block.norm if model.cfg.block == "nrgpt" else model.final_norm
    return norm(x), {}, None, lambda: plan.move(x, t)


def read_out(
    model: Network, x: Tensor, targets: Tensor | None, top: int
) -> dict[str, Tensor | None]:
    """The fields of ``Step`` that come from the readout, for a bounded number of logits at a
    time."""
    rows = max(1, LOGITS_AT_ONCE // model.cfg.vocab_size)
    wanted = None if targets is None else targets.flatten().split(rows)
    parts: list[tuple[Any, ...]] = []
    for i, some in enumerate(x.flatten(0, 1).split(rows)):
        logits = model.readout(some)
        # At least float32: a sum over a large vocabulary does not survive bfloat16.
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        best, tokens = log_p.max(-1, keepdim=True) if top == 1 else log_p.topk(top)
        parts.append((-torch.linalg.vecdot(log_p.exp(), log_p), tokens, best.exp()))
        if wanted is not None:
            loss = F.nll_loss(log_p, wanted[i], reduction="none", ignore_index=IGNORED_TARGET)
            ignored = wanted[i] == IGNORED_TARGET
            parts[-1] += (loss.masked_fill(ignored, float("nan")),)
    shape = x.shape[:-1]
    entropy, tokens, best, *losses = (
        torch.cat(column).unflatten(0, shape) for column in zip(*parts, strict=True)
    )
    loss_of_all = losses[0] if losses else None
    return dict(zip(SAID, (entropy, loss_of_all, tokens, best), strict=True))
