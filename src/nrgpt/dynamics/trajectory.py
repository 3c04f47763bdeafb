"""What happens to every token over the steps: its energies, its force, how far it moves, and what
the model would say if it stopped there.

Energies cost little more than the forward pass: one look at a state gives its energies, its forces
and the next state. What the model would say costs more where the vocabulary is large: a product
with the whole head at every step, which ``readouts=False`` leaves out.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..check import check_choice
from ..model.candidate import CandidatePlan
from ..model.network import IGNORED_TARGET, Network
from ..model.norm import Norm
from ..model.step import Extra, Observation, Plan
from .short import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOGITS_AT_ONCE = 1 << 22
"""Logits made at a time. With a large vocabulary, those of all tokens would need more memory than
everything else."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A record of one state. Tensors are on the CPU, of shape (batch, tokens) unless noted."""

    energies: dict[str, Tensor]
    """The sum as ``total``, then each term by name; empty with energies=False."""
    force: Tensor | None
    """||dE_A/dg_A||, the norm of the summed force of all terms; None with energies=False."""
    angle: Tensor | None
    """Degrees between the normalised token and the force that it feels: 0 where it rests. None with
    energies=False."""
    push: Tensor | None
    """How far the safeguard moves the next state; None without one."""
    size: Tensor
    """||x||"""
    move: Tensor | None
    """||g - g before||; None in the first state. A baseline's g is what its head reads."""
    entropy: Tensor | None
    """Of what the model would say, in nats. This and all below: None with readouts=False."""
    loss: Tensor | None
    """In nats; None without targets, NaN where a target is ignored."""
    top_tokens: Tensor | None
    """The likeliest next tokens, best first: (batch, tokens, top)."""
    top_probabilities: Tensor | None


@short
@dataclass(frozen=True, kw_only=True)
class Step(Watched):
    """The state after ``t`` steps."""

    t: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Trajectory(Watched):
    """All states, 0 to T, along a new first dimension: (T + 1, batch, tokens). ``move`` has T
    entries, one for each pair of consecutive states."""

    idx: Tensor
    targets: Tensor | None
    trained_steps: int
    move: Tensor
    label: Callable[[int], str] = str
    """A token's text, for figures and the page."""

    @property
    def steps(self) -> int:
        return len(self.size) - 1

    @property
    def argmax(self) -> Tensor:
        """The token that the model would say if it stopped there: (T + 1, batch, tokens)."""
        return self.said()[0][..., 0]

    def said(self) -> tuple[Tensor, Tensor]:
        """The likeliest tokens and their probabilities, (T + 1, batch, tokens, top)."""
        if self.top_tokens is None or self.top_probabilities is None:
            raise ValueError("no logits were made: this trajectory was made with readouts=False")
        return self.top_tokens, self.top_probabilities

    def mean_loss(self) -> Tensor:
        """The mean over all tokens that have a target, for each state: (T + 1,)."""
        if self.loss is None:
            raise ValueError("no loss without targets; pass them to trajectory()")
        return self.loss.flatten(1).nanmean(1)

    def __repr__(self) -> str:
        states, batch, tokens = self.size.shape
        told = [f"{states - 1} steps of {batch} x {tokens} tokens"]
        if self.energies:
            total = self.energies["total"].double()
            told.append(f"mean energy {total[0].mean():.4g} -> {total[-1].mean():.4g}")
        if self.loss is not None:
            loss = self.mean_loss()
            told.append(f"mean loss {loss[0]:.4g} -> {loss[-1]:.4g}")
        return f"Trajectory({', '.join(told)})"

    def plot(self, what: str = "energies", **options: Any) -> "Figure":
        """A matplotlib figure of one text: its "energies" over the steps, a "heatmap" of how each
        step changes them, or the "readout", what the model would say after each step. The options
        are those of the functions in nrgpt.dynamics.figures: ``sample``, ``tokens``, ``label``."""
        from .figures import energy_figure, heatmap_figure, readout_figure

        drawn = {"energies": energy_figure, "heatmap": heatmap_figure, "readout": readout_figure}
        check_choice("what", what, drawn)
        own = {} if what == "energies" else {"label": self.label}
        figure: Figure = drawn[what](self, **own | options)
        return figure

    def page(self, path: Path | str = "trajectory.html", **options: Any) -> Path:
        """Write one HTML file to look around in, and return its path. The options are those of
        nrgpt.dynamics.page.write_page: ``label`` turns a token's number into its text."""
        from .page import write_page

        write_page(self, Path(path), **{"label": self.label} | options)
        return Path(path)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything by name, for np.savez; energies are called energy_NAME."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        tensors |= {f"energy_{name}": energy for name, energy in self.energies.items()}
        arrays = {
            name: (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()  # NumPy has no bfloat16
        }
        return arrays | {"trained_steps": np.array(self.trained_steps)}

    def save(self, path: Path, names: Collection[str] | None = None) -> None:
        """Write the arrays, or only those of these names, for np.load."""
        kept = {n: array for n, array in self.arrays().items() if names is None or n in names}
        np.savez_compressed(path, **kept)  # type: ignore[arg-type]  # allow_pickle is no array


def energy_name(term: str) -> str:
    """What figures and tables call the energy of a term, or the total."""
    return "energy" if term == "total" else f"{term} energy"


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
    """Watch the tokens ``idx`` (batch, tokens) in all states of the forward pass.

    ``steps`` and ``extra`` are those of the model's forward pass; ``top`` is how many of the
    likeliest tokens to keep. A baseline has no energy: ``energies=False`` watches the rest.
    ``readouts=False`` leaves out what the model would say, and its loss, which cost a product with
    the whole vocabulary in every state. Dropout is off, and everything is computed in the precision
    of the weights, even under autocast: a step may change an energy by little.

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
    states = list(
        stream_trajectory(
            model, idx, targets, steps, extra, energies=energies, readouts=readouts, top=top
        )
    )
    stacked: dict[str, Any] = {}
    for field in fields(Watched):
        values = [getattr(state, field.name) for state in states]
        if field.name == "energies":
            stacked["energies"] = {n: torch.stack([v[n] for v in values]) for n in values[0]}
        else:
            there = [value for value in values if value is not None]
            stacked[field.name] = torch.stack(there) if there else None
    return Trajectory(
        idx=idx.detach().cpu(),
        targets=None if targets is None else targets.detach().cpu(),
        trained_steps=model.cfg.steps,
        **stacked,
    )


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
    if energies and not model.is_watched:
        _ = model.energy_block  # raises for a baseline
    if targets is not None and targets.shape != idx.shape:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}; they must have that of idx, "
            f"{tuple(idx.shape)}"
        )
    if targets is not None and not readouts:
        raise ValueError("targets are for the loss, which readouts=False leaves out")
    if not 1 <= top <= model.cfg.vocab_size:
        raise ValueError(f"top = {top}: must be in 1 .. vocab_size = {model.cfg.vocab_size}")
    precisely = torch.autocast(model.tokens.device.type, enabled=False)
    with torch.no_grad(), precisely:
        plans = model.plan(extra)
        start, memory = plans.begin(model.embed(idx))

    @torch.no_grad()
    def watch() -> Iterator[Step]:
        norm = model.energy_block.norm if model.cfg.has_energy else model.final_norm
        x, g_before = start, None
        for t in range(steps + 1):
            with precisely:  # left before each yield: it must not reach the caller
                plan, found, felt = plans.at(t), {}, Felt()
                if energies:
                    assert isinstance(plan, (Plan, CandidatePlan))
                    look = plan.observe(x, t, memory)
                    found, g = {"total": look.energy, **look.energies}, look.g
                    felt = Felt.of(look, x, norm)
                else:
                    g = norm(x)
                step = Step(
                    t=t,
                    energies={name: energy.cpu() for name, energy in found.items()},
                    **felt._asdict(),
                    size=x.norm(dim=-1).cpu(),
                    move=None if g_before is None else (g - g_before).norm(dim=-1).cpu(),
                    **what_it_says(model, x, targets, top if readouts else 0),
                )
                if t < steps:
                    x, g_before = x + look.update if energies else plan.move(x, t, memory), g
            yield step

    return watch()


class Felt(NamedTuple):
    """What an energy does to tokens: fields of ``Watched``."""

    force: Tensor | None = None
    angle: Tensor | None = None
    push: Tensor | None = None

    @classmethod
    def of(cls, look: Observation, x: Tensor, norm: Norm) -> "Felt":
        force = look.force
        pull = force if norm.gamma is None else norm.centred(norm.gamma * force)
        seen = norm.centred(x)
        cosine = F.cosine_similarity(pull, seen, dim=-1, eps=torch.finfo(x.dtype).tiny)
        push = None if look.push is None else look.push.cpu()
        angle = cosine.clamp(-1, 1).acos().rad2deg()
        return cls(force.norm(dim=-1).cpu(), angle.cpu(), push)


def what_it_says(
    model: Network, x: Tensor, targets: Tensor | None, top: int
) -> dict[str, Tensor | None]:
    """The fields of ``Watched`` that need logits, made for some tokens at a time. With ``top`` = 0
    they are None."""
    names = ("entropy", "top_tokens", "top_probabilities", "loss")
    if not top:
        return dict.fromkeys(names)
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
    columns = [torch.cat(c).unflatten(0, x.shape[:-1]).cpu() for c in zip(*parts, strict=True)]
    return dict.fromkeys(names) | dict(zip(names, columns, strict=False))
