"""What is measured of a trained probe: losses, losses at other numbers of steps, sizes and pushes,
energies that rise, and what stopping early costs."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from probe import Config, Model, autocast, exact, layer, nll, norm
from torch import Tensor

RELATIVE = 1e-6
"""Rises of more than this share of |E| are counted apart from those in the last bits of fp32."""


def windows_of(
    stream: np.ndarray, c: Config, device: torch.device, count: int
) -> tuple[Tensor, Tensor]:
    """The first ``count`` disjoint windows (as many as there are, in whole batches) and targets."""
    count = min(count, (len(stream) - 1) // c.context) // c.batch * c.batch
    data = torch.from_numpy(stream[: count * c.context + 1].astype(np.int64)).to(device)
    return data[:-1].view(count, c.context), data[1:].view(count, c.context)


def batches(x: Tensor, y: Tensor, size: int):
    return zip(x.split(size), y.split(size), strict=True)


@torch.no_grad()
def measure(
    model: Model, c: Config, stream: np.ndarray, device: torch.device, record: Callable
) -> None:
    model.eval()
    # Without a compiler: to compile for a few batches takes longer than they do.
    model.layer, model.nll, model.compiled = layer, nll, model.step
    tokens, targets = windows_of(stream, c, device, c.windows)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for x, y in batches(tokens, targets, c.batch):
        with autocast(c, device):
            *_, (state, _, _) = model.walk(x, c.steps)
            total += model.loss(state, y).double().sum()
    record(validation=total.item() / tokens.numel(), validation_tokens=tokens.numel())
    if not c.steps:
        return
    part = tokens[: c.part], targets[: c.part]
    record(**depths(model, c, *part, device))
    if c.cone:
        record(rises=rises(model, c, tokens, device, "fp32", c.pairs))
        record(rises_bf16=rises(model, c, tokens, device, "bf16", c.pairs // 8))
    if c.settled:
        half = max(1, c.part // 2)
        record(**stops(model, c, part[0][:half], part[1][:half], device))


def depths(model: Model, c: Config, tokens: Tensor, targets: Tensor, device: torch.device) -> dict:
    """Losses on a part of the split at 0.5, 1, 2 and 4 times the trained steps, gains falling by
    c.beyond after the trained ones and not falling; sizes and shares of pushed tokens."""
    out: dict = {"part_tokens": tokens.numel()}
    wanted = sorted({max(1, c.steps // 2), c.steps, 2 * c.steps, 4 * c.steps})
    for beyond in sorted({c.beyond, 1.0}):
        sums = dict.fromkeys(wanted, 0.0)
        size = torch.zeros(4 * c.steps + 1, device=device)
        acted, relative = torch.zeros_like(size), torch.zeros_like(size)
        for x, y in batches(tokens, targets, c.batch):
            with autocast(c, device):
                before = None
                for t, (state, push, _) in enumerate(model.walk(x, 4 * c.steps, beyond)):
                    size[t] += state.norm(dim=-1).sum()
                    if before is not None:
                        relative[t] += (norm(state) - norm(before)).norm(
                            dim=-1
                        ).sum() / c.width**0.5
                    if push is not None:
                        acted[t] += (push > 0).sum()
                    if t in sums:
                        sums[t] += model.loss(state, y).sum().item()
                    before = state
        out[f"loss_at_{beyond}"] = {t: round(s / tokens.numel(), 4) for t, s in sums.items()}
        short = slice(0, c.steps + 1)
        out["size"] = [round(v, 2) for v in (size / tokens.numel())[short].tolist()]
        out["acted"] = [round(v, 4) for v in (acted / tokens.numel())[short].tolist()]
        out["moved"] = [round(v, 4) for v in (relative / tokens.numel())[short].tolist()]
        out[f"moved_last_at_{beyond}"] = round((relative[-1] / tokens.numel()).item(), 5)
    return out


def rises(
    model: Model, c: Config, tokens: Tensor, device: torch.device, precision: str, pairs: int
) -> dict:
    """Of pairs (token, step): energy before and after, keys standing, both in fp32. The states are
    those of a forward pass in ``precision``."""
    needed = -(-pairs // (c.steps * c.context))
    tokens = tokens[: min(needed, len(tokens))]
    count = strict = above = 0
    worst, fall, scale = -math.inf, 0.0, 0.0
    by_step = [0] * c.steps
    parts = torch.zeros(3, device=device, dtype=torch.float64)
    for x in tokens.split(4):
        before = None
        inexact = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        walk = model.walk(x, c.steps, attend=exact)
        for t in range(c.steps + 1):
            with inexact:
                state, _, (past, drive, W) = next(walk)
            if before is not None:
                kept = past if past is not None else model.read(before, None, drive, W)[3]
                kept, driven = kept.float(), None if drive is None else drive.float()
                ends = [model.energies(s, kept, driven, W) for s in (before, state)]
                old, new = (sum(e) for e in ends)
                parts += torch.stack([(a - b).double().sum() for a, b in zip(*ends, strict=True)])
                rise = (new - old) / old.abs().clamp_min(1e-3)
                count += rise.numel()
                strict += int((rise > 0).sum())
                above += int((rise > RELATIVE).sum())
                by_step[t - 1] += int((rise > RELATIVE).sum())
                worst = max(worst, rise.max().item())
                fall += (old - new).double().sum().item()
                scale += old.abs().double().sum().item()
            before = state
    return {
        "pairs": count, "rises": strict, f"rises_above_{RELATIVE}": above,
        "largest_relative": worst,
        "mean_fall_per_step": fall / count,
        "fall_of_attention_hidden_field": (parts / count).tolist(),
        "mean_energy": scale / count, "by_step": by_step,
    }  # fmt: skip


def stops(model: Model, c: Config, tokens: Tensor, targets: Tensor, device: torch.device) -> dict:
    """Stopping a token by a rule: the fewest mean steps at most 0.01 nats behind all steps.

    A rule looks at step t (from the second on) at one number and stops if it is below a threshold.
    Nobody else's logits change: a settled past does not move."""
    losses, signals = [], {"move": [], "kl": [], "entropy": [], "energy": []}
    for x, y in batches(tokens, targets, 4):
        rows: list[Tensor] = []
        gathered: dict[str, list[Tensor]] = {k: [] for k in signals}
        before = log_before = energy_before = None
        for state, _, (past, drive, W) in model.walk(x, c.steps, attend=exact):
            with autocast(c, device):
                logits = model.logits(state)
            log_p = logits.float().log_softmax(-1)
            rows.append(F.nll_loss(log_p.flatten(0, 1), y.flatten(), reduction="none"))
            energy = model.energy(state, past, drive, W) if c.cone else None
            if before is not None and log_before is not None:
                gathered["move"].append((norm(state) - norm(before)).norm(dim=-1).flatten())
                gathered["kl"].append((log_p.exp() * (log_p - log_before)).sum(-1).flatten())
                gathered["entropy"].append(-(log_p.exp() * log_p).sum(-1).flatten())
                if energy is not None and energy_before is not None:
                    gathered["energy"].append((energy_before - energy).flatten())
            before, log_before, energy_before = state, log_p, energy
        losses.append(torch.stack(rows))
        for k, v in gathered.items():
            if v:
                signals[k].append(torch.stack(v))
    loss = torch.cat(losses, 1)  # (steps + 1, tokens)
    fixed = loss.mean(1).tolist()
    best: dict[str, dict] = {}
    T = c.steps
    for name, parts in signals.items():
        if not parts:
            continue
        signal = torch.cat(parts, 1)  # (steps, tokens): after step 1, 2, ...
        levels = torch.quantile(
            signal.flatten()[:: max(1, signal.numel() // 200_000)].float(),
            torch.linspace(0.02, 0.98, 49, device=device),
        )
        curve = []
        for level in levels:
            below = signal < level
            below[-1] = True
            stop = below.float().argmax(0) + 1  # the first step after which it is below
            mean = loss.gather(0, stop[None]).mean().item()
            curve.append((round(stop.float().mean().item(), 3), round(mean, 4)))
        fine = [p for p in curve if p[1] <= fixed[T] + 0.01] or [(float(T), fixed[T])]
        best[name] = {"steps": min(fine)[0], "curve": curve[::6]}
    enough = next(t for t in range(T + 1) if fixed[t] <= fixed[T] + 0.01)
    oracle = (loss <= loss[T] + 0.01).float().argmax(0).float().mean().item()
    by_step = [round(v, 4) for v in fixed]
    return {
        "stops": best,
        "fixed_steps_enough": enough,
        "oracle_steps": round(oracle, 3),
        "loss_by_step": by_step,
    }
