"""How tokens move: the paper's figures, and certified models beside the others."""

import json
from dataclasses import asdict
from typing import Any

import torch
from common import Results, Study, batches, mean, show, token_losses, windows
from torch import Tensor

import nrgpt
from nrgpt.dynamics.convergence import settling_order, stability, transients
from nrgpt.dynamics.figures import energy_figure, heatmap_figure, new_figure, save, token_label
from nrgpt.dynamics.plots import convergence_figure, doubling
from nrgpt.measure.loss import split_loss
from nrgpt.train.runs import Run

MULTIPLES = (0.5, 1, 2, 4)
"""Of the trained number of steps."""


def energies(study: Study) -> None:
    """Energies of 64 validation tokens over the trained steps and over four times as many: the
    paper's two figures, if the runs are those. Do energies end lower than they began, and do they
    settle?"""
    results = Results(study.to / "energies.json")
    for run in study.open():
        model = run.model.double()
        text = windows(run, run.cfg.model.context)[:1, :65]
        trained = model.cfg.steps
        for steps in (trained, 4 * trained):
            seen = nrgpt.trajectory(model, text[:, :-1], steps=steps, readouts=False)
            name = f"{run.folder.name}-{steps}-steps"
            save(energy_figure(seen), study.to / f"energies-{name}", ("png",))
            save(
                heatmap_figure(seen, token_label(run.tokenizer)),
                study.to / f"heatmap-{name}",
                ("png",),
            )
            results.add(run, f"{steps} steps", about_energies(seen.energies, seen.size))
        found = results.found[run.folder.name]
        show(
            f"{run.folder.name}: energies of 64 tokens",
            ["steps", "start", "end", "tokens that end lower", "late steps that raise"],
            [
                [key, entry["start"]["total"], entry["end"]["total"], entry["end lower"],
                 entry["rising in the last quarter"]]
                for key, entry in found.items() if key.endswith("steps")
            ],
        )  # fmt: skip


def about_energies(by_term: dict[str, Tensor], size: Tensor) -> dict[str, object]:
    total = by_term["total"]
    relative = total.diff(dim=0) / total[1:].abs()
    rises = relative > 1e-6
    quarter = max(1, len(rises) // 4)
    return {
        "start": {name: value[0].mean().item() for name, value in by_term.items()},
        "end": {name: value[-1].mean().item() for name, value in by_term.items()},
        "end lower": (total[-1] < total[0]).double().mean().item(),
        "rising": rises.double().mean().item(),
        "rising in the first quarter": rises[:quarter].double().mean().item(),
        "rising in the last quarter": rises[-quarter:].double().mean().item(),
        "largest relative rise in the last quarter": relative[-quarter:].max().item(),
        "last relative change": ((total[-1] - total[-2]) / total[-1]).abs().mean().item(),
        "size at start and end": [size[0].mean().item(), size[-1].mean().item()],
        "rank correlation of position and settling": settling_order(total),
    }


def certified(study: Study) -> None:
    """Certified models beside the others: loss, rising energies, rest, and other numbers of steps.

    The loss at the trained number of steps is that of the whole split with overlapping windows, as
    in a run's result; those at other numbers are of windows side by side."""
    results = Results(study.to / "certified.json")
    curves: dict[str, dict[str, dict[str, float]]] = {}
    for run in study.open():
        model = run.model
        certificate = model.certificate()
        results.add(run, "certificate", str(certificate))
        results.add(run, "certified", bool(certificate))
        results.add(run, "parameters", model.parameter_counts().total)
        if not study.quick:
            results.add(run, "validation loss", whole_split(run))
        curves[run.folder.name] = other_numbers_of_steps(study, run, results)
        save(steps_figure(curves), study.to / "certified-steps", ("png",))
        model.double()
        text = windows(run, study.size(4_096, 128))
        rises = model.certificate(idx=text[:, :-1]).check
        results.add(run, "descent, frozen past", asdict(rises.frozen))
        results.add(run, "descent, in parallel", asdict(rises.parallel))
        rest(study, run, text[: 4 if study.device == "cpu" else None, :-1], results)


def whole_split(run: Run) -> float:
    """As the run's result says or, where it has none, computed here."""
    result = run.folder / "result.json"
    if result.is_file():
        return float(json.loads(result.read_text())["val_loss_full"])
    return split_loss(run.model, run.dataset(verify=False).tokens("val"), progress=True).loss


def steps_figure(curves: dict[str, dict[str, dict[str, float]]]) -> Any:
    """Loss against the number of steps, of all runs so far."""
    figure = new_figure(6, 4)
    axis = figure.subplots()
    for name, curve in curves.items():
        points = list(curve.values())
        axis.errorbar(
            [point["multiple"] for point in points],
            [point["loss"] for point in points],
            [point["error"] for point in points],
            marker="o",
            label=name,
        )
    axis.set(xlabel="steps, as a multiple of the trained", ylabel="validation loss (nats)")
    axis.set_xscale("log", base=2)
    axis.set_xticks(MULTIPLES, [f"{multiple:g}" for multiple in MULTIPLES])
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


@torch.no_grad()
def other_numbers_of_steps(study: Study, run: Run, results: Results) -> dict[str, dict[str, float]]:
    text = windows(run, study.size(study.tokens or 10**9, 256))
    found = {}
    for multiple in MULTIPLES:
        steps = max(1, round(multiple * run.model.cfg.steps))
        losses = [
            token_losses(run.model(idx, steps=steps)[0], targets) for idx, targets in batches(text)
        ]
        loss = mean(torch.cat(losses))
        found[str(steps)] = {"multiple": multiple, "loss": loss.value, "error": loss.error}
        results.add(run, "loss by steps", found)
    rows = [[steps, entry["loss"], entry["error"]] for steps, entry in found.items()]
    show(f"{run.folder.name}: loss after other numbers of steps", ["steps", "loss", "±"], rows)
    return found


def rest(study: Study, run: Run, idx: Tensor, results: Results) -> None:
    """When tokens come to rest, and whether they come back if pushed."""
    model = run.model
    steps = study.size(25 if study.device == "cpu" else 50, 3) * model.cfg.steps
    with torch.no_grad():
        *_, last = model.states(idx)
    rows = []
    for name, past in (("in parallel", None), ("frozen past", last)):
        generator = torch.Generator(idx.device).manual_seed(0)
        found = transients(model, idx, steps=steps, past=past, progress=True)
        pushed = stability(
            model, idx, settle=steps, steps=steps, past=past, generator=generator, progress=True
        )
        figure = convergence_figure(found, pushed)
        file = f"rest-{run.folder.name}-{name.replace(' ', '-')}"
        save(figure, study.to / file, ("png",))
        about = {
            "tokens": idx.numel(),
            "steps": found.steps,
            "tolerance": found.tolerance,
            "share at rest": found.share_at_rest.mean().item(),
            "median of those": found.lengths.nanmedian().item(),
            "share at rest by position": {
                f"{p.start + 1} to {p.stop}": found.at_rest(p)[-1].item()
                for p in doubling(idx.shape[1])
            },
            "moves by step": {
                t: quartiles(found.moves[t - 1])
                for t in (model.cfg.steps, found.steps // 4, found.steps // 2, found.steps)
            },
            "of a push is left": quartiles(pushed.left),
            "factor a step": quartiles(pushed.factors),
            "power of the steps": quartiles(pushed.powers),
            "share that loses half of a push": pushed.share_back,
        }
        results.add(run, f"rest, {name}", about)
        length, left = found.lengths.nanmedian().item(), pushed.left.median().item()
        rows.append([name, about["share at rest"], length, left, pushed.powers.median().item()])
    headings = ["past", "share at rest", "median steps to it", "left of a push", "power"]
    show(f"{run.folder.name}: at rest after {steps} steps", headings, rows)


def quartiles(values: Tensor) -> list[float]:
    """Least, the quartiles, most."""
    at = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    return torch.quantile(values.double().flatten(), at).tolist()
