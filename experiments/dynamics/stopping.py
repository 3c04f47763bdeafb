"""Fewer steps and other steps: stopping token by token, and other solvers for the same energy."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import Results, Study, batches, mean, show, token_losses, windows
from rich.progress import track
from torch import Tensor

from nrgpt.dynamics.field import Field
from nrgpt.dynamics.figures import new_figure, save
from nrgpt.dynamics.relax import Stop, relax
from nrgpt.dynamics.solvers import Anderson, Backtracking, Momentum, Plain, Solver
from nrgpt.dynamics.trajectory import trajectory
from nrgpt.language_model import LanguageModel
from nrgpt.model.step import Observation
from nrgpt.train.runs import Run

ALLOWED = 0.01
"""Nats that half the steps may cost."""


@dataclass(frozen=True)
class Point:
    """One way to stop, beside all steps for every token."""

    name: str
    loss: float
    error: float
    mean_steps: float
    computed: float
    """Token states computed, per token: rows of a batch wait for their slowest token."""
    more: float
    """Loss above that of all steps, on the same tokens."""
    more_error: float


def rules(model: LanguageModel, idx: Tensor, quick: bool) -> list[Stop]:
    """Of each kind, from hardly ever to almost at once. Forces have no natural scale: their
    tolerances are quantiles of what the model has. Readouts of the first states are sure of the
    token that is there, so some rules are also tried with a number of steps that all tokens
    take."""
    late = max(1, model.cfg.steps // 2 - 1)
    if quick:
        return [Stop("kl", 1e-2), Stop("kl", 1e-2, minimum=late), Stop("argmax")]
    force = trajectory(model, idx, readouts=False).force
    assert force is not None
    sample = force[1:].double().flatten()[::7]
    quantiles = torch.quantile(sample[:100_000], torch.linspace(0.05, 0.9, 6).double())
    return [
        *(Stop("kl", 10.0**-e) for e in (4, 3, 2.5, 2, 1.5, 1)),
        *(Stop("kl", 10.0**-e, minimum=late) for e in (3, 2.5, 2, 1.5, 1, 0.5)),
        *(Stop("entropy", value) for value in (0.02, 0.1, 0.4, 1.0)),
        *(Stop("entropy", value, minimum=late) for value in (0.1, 0.4, 1.0, 1.5)),
        *(Stop("energy", 10.0**-e) for e in (4, 3, 2, 1)),
        *(Stop("energy", 10.0**-e, minimum=late) for e in (3, 2, 1)),
        *(Stop("force", float(value)) for value in quantiles),
        *(Stop("argmax", patience=patience) for patience in (1, 2, 3)),
        *(Stop("argmax", patience=patience, minimum=late) for patience in (1, 2)),
    ]


def kind(stop: Stop) -> str:
    return stop.rule if stop.minimum == 1 else f"{stop.rule}, at least {stop.minimum} steps"


def adaptive(study: Study) -> None:
    """Loss against the mean number of steps, for each rule and for a number that is the same for
    all tokens. Does half of the steps cost at most 0.01 nats?"""
    results = Results(study.to / "adaptive.json")
    for run in study.open():
        text = windows(run, study.size(study.tokens or 10**9, 256))
        results.add(run, "tokens", text[:, 1:].numel())
        results.add(run, "trained with", run.cfg.random_steps or run.model.cfg.steps)
        points = {"the same for all": fixed_steps(run, text, results)}
        full = points["the same for all"][-1]
        for stop in rules(run.model, text[:8, :-1], study.quick):
            points.setdefault(kind(stop), []).append(stopped(run, text, stop, full.per_token))
            found = {name: [asdict(p.point) for p in line] for name, line in points.items()}
            results.add(run, "points", found)
        verdict = half_the_steps(run, [p.point for line in points.values() for p in line])
        results.add(run, "half the steps", verdict)
        lines = {name: [p.point for p in line] for name, line in points.items()}
        draw(study.to, run.folder.name, run.model.cfg.steps, lines)


@dataclass(frozen=True)
class Measured:
    point: Point
    per_token: Tensor


def measured(
    name: str, losses: Tensor, full: Tensor | None, mean_steps: float, computed: float
) -> Measured:
    loss, more = mean(losses), mean(losses - (losses if full is None else full))
    errors = (more.value, more.error)
    return Measured(Point(name, loss.value, loss.error, mean_steps, computed, *errors), losses)


@torch.no_grad()
def fixed_steps(run: Run, text: Tensor, results: Results) -> list[Measured]:
    """1, 2, ... steps for every token: one pass that is read out at each step."""
    steps = run.model.cfg.steps
    losses: list[list[Tensor]] = [[] for _ in range(steps)]
    for idx, targets in track(list(batches(text)), "the same for all"):
        for t, x in enumerate(run.model.states(idx)):
            if t > 0:
                losses[t - 1].append(token_losses(run.model.readout(x), targets))
    whole = [torch.cat(parts) for parts in losses]
    return [
        measured(f"{t} steps", loss, whole[-1], float(t), float(t))
        for t, loss in enumerate(whole, 1)
    ]


@torch.no_grad()
def stopped(run: Run, text: Tensor, stop: Stop, full: Tensor) -> Measured:
    losses, steps, computed = [], 0, 0
    name = kind(stop) if stop.rule == "argmax" else f"{kind(stop)}, {stop.tolerance:.3g}"
    name = name if stop.patience == 1 else f"{name}, {stop.patience} times"
    for idx, targets in track(list(batches(text)), name):
        found = relax(run.model, idx, stop=stop)
        losses.append(token_losses(run.model.readout(found.x), targets))
        steps += int(found.steps.sum())
        computed += found.computed
    tokens = text[:, 1:].numel()
    return measured(name, torch.cat(losses), full, steps / tokens, computed / tokens)


def half_the_steps(run: Run, points: list[Point]) -> dict[str, Any]:
    """The cheapest in loss among those with at most half of the steps, on average, and the fewest
    steps among those within what is allowed."""
    half = run.model.cfg.steps / 2
    best = min((p for p in points if p.mean_steps <= half), key=lambda p: p.more)
    fewest = min((p for p in points if p.more <= ALLOWED), key=lambda p: p.mean_steps)
    rows = [
        ["least loss with half the steps", best.name, best.mean_steps, best.more, best.more_error],
        ["fewest steps for 0.01 nats", fewest.name, fewest.mean_steps, fewest.more,
         fewest.more_error],
    ]  # fmt: skip
    headings = ["", "rule", "mean steps", "nats above all steps", "±"]
    show(f"{run.folder.name}, {run.model.cfg.steps} steps", headings, rows)
    return {
        "reached": best.more <= ALLOWED,
        "best with half the steps": asdict(best),
        "fewest steps within 0.01 nats": asdict(fewest),
    }


def draw(to: Path, name: str, steps: int, points: dict[str, list[Point]]) -> None:
    """Loss against mean steps: a colour for each rule, dashed where all tokens take some steps."""
    figure = new_figure(8, 4.2)
    axis = figure.subplots()
    colours: dict[str, str] = {}
    for label, line in points.items():
        line = sorted(line, key=lambda p: p.mean_steps)
        rule, late = label.split(",")[0], "," in label
        colour = colours.setdefault(rule, f"C{len(colours) - 1}" if colours else "black")
        axis.plot(
            [p.mean_steps for p in line],
            [p.more for p in line],
            marker="s" if late else "o",
            linestyle="--" if late else "-",
            markersize=4,
            linewidth=2 if colour == "black" else 1.2,
            color=colour,
            label=label,
        )
    axis.axhline(ALLOWED, color="grey", linewidth=0.8)
    axis.axvline(steps / 2, color="grey", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=ALLOWED)
    axis.set_yticks([-0.01, 0, 0.01, 0.1, 1], ["-0.01", "0", "0.01", "0.1", "1"])
    axis.set_ylim(bottom=-0.015)
    axis.set(xlabel="mean steps of a token", ylabel="loss above that of all steps (nats)")
    axis.set_title(f"{name}: grey lines mark half the steps and 0.01 nats", fontsize=10)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save(figure, to / f"adaptive-{name}", ("png",))


# Solvers -----------------------------------------------------------------------------------------


class Counted(Solver):
    """Another solver, and how often it asks for energies beyond the one look at each step."""

    def __init__(self, solver: Solver):
        super().__init__()
        self.solver, self.asked = solver, 0

    def step(self, field: Field, look: Observation, x: Tensor, t: int) -> Tensor:
        energy = field.energy

        def counted(x: Tensor, t: int | None = None) -> Tensor:
            self.asked += 1
            return energy(x, t)

        field.energy = counted  # type: ignore[method-assign]
        try:
            return self.solver.step(field, look, x, t)
        finally:
            del field.energy

    def select(self, rows: Tensor, columns: Tensor) -> None:
        self.solver.select(rows, columns)


def kinds(quick: bool) -> dict[str, Callable[[], Solver]]:
    few: dict[str, Callable[[], Solver]] = {"plain": Plain, "momentum 0.3": lambda: Momentum(0.3)}
    if quick:
        return few
    return few | {
        "momentum 0.6": lambda: Momentum(0.6),
        "momentum 0.9": lambda: Momentum(0.9),
        "backtracking": Backtracking,
        "anderson 2": lambda: Anderson(2),
        "anderson 5": lambda: Anderson(5),
    }


@torch.no_grad()
def solvers(study: Study) -> None:
    """Loss and energy after as many force evaluations. All solvers ask for one force a step; some
    ask for energies too, which is counted beside it."""
    results = Results(study.to / "solvers.json")
    for run in study.open():
        model, trained = run.model, run.model.cfg.steps
        text = windows(run, study.size(study.tokens or 16_384, 128))
        budgets = sorted({max(1, round(m * trained)) for m in (0.25, 0.5, 0.75, 1, 1.5, 2, 4)})
        found: dict[str, dict[str, Any]] = {}
        for name, make in kinds(study.quick).items():
            for steps in track(budgets, name):
                losses, energies, asked = [], [], 0
                for idx, targets in batches(text):
                    solver = Counted(make())
                    x = relax(model, idx, steps=steps, solver=solver).x
                    losses.append(token_losses(model.readout(x), targets))
                    energies.append(torch.stack(list(model.energies(x).values())).sum(0).cpu())
                    asked = solver.asked
                loss, energy = mean(torch.cat(losses)), mean(torch.cat(energies))
                found.setdefault(name, {})[str(steps)] = {
                    "loss": loss.value,
                    "error": loss.error,
                    "energy": energy.value,
                    "energies asked for": asked,
                }
                results.add(run, "solvers", found)
        show(
            f"{run.folder.name}: loss after as many forces",
            ["solver", *map(str, budgets)],
            [[name, *(entry["loss"] for entry in line.values())] for name, line in found.items()],
        )
        figure = solvers_figure(found, trained)
        save(figure, study.to / f"solvers-{run.folder.name}", ("png",))


def solvers_figure(found: dict[str, dict[str, Any]], trained: int) -> Any:
    """Loss and energy after as many forces, of each solver: related ones have one colour."""
    figure = new_figure(11, 4)
    colours: dict[str, str] = {}
    for axis, what in zip(figure.subplots(1, 2), ("loss", "energy"), strict=True):
        for i, (name, line) in enumerate(found.items()):
            kind, budgets = name.split()[0], [int(steps) for steps in line]
            colour = colours.setdefault(kind, f"C{len(colours)}" if colours else "black")
            style = ("-", "--", ":")[sum(other.startswith(kind) for other in list(found)[:i])]
            values = [entry[what] for entry in line.values()]
            label = name if what == "loss" else None
            axis.plot(budgets, values, style, color=colour, marker="o", markersize=3, label=label)
        axis.axvline(trained, color="grey", linestyle=":")
        axis.set(xlabel="force evaluations (dotted: as trained)", ylabel=f"mean {what}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [f"{steps}" for steps in budgets])
        axis.grid(alpha=0.3)
    best = min(entry["loss"] for line in found.values() for entry in line.values())
    figure.axes[0].set_ylim(best - 0.1, best + 1.6)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
