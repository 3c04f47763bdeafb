"""What sampling does to text: tokens that have ended are heated where they are, each in the field
of a past that stands still, and read while they walk."""

from typing import Any

import torch
from common import Mean, Results, Study, mean, show, token_losses
from rich.progress import track
from torch import Tensor

from nrgpt.dynamics.field import Field
from nrgpt.dynamics.figures import new_figure, save
from nrgpt.dynamics.solvers import Langevin
from nrgpt.train.runs import Run

TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
ACCEPTED = 0.6
"""The rate is tuned to this share of accepted moves in the first quarter of the steps, and kept."""


@torch.no_grad()
def sampling(study: Study) -> None:
    """Loss against temperature, after several numbers of steps, and that of the mean probabilities
    over the second half of the walk."""
    results = Results(study.to / "sampling.json")
    steps, texts = study.size(400, 8), study.size(4, 2)
    for run in study.open():
        length = min(study.size(128, 16), run.cfg.model.context)
        count = texts * length + 1
        tokens = torch.from_numpy(run.first_tokens("val", count).read(0, count))
        idx, targets = tokens[:-1].view(texts, length), tokens[1:].view(texts, length)
        results.add(run, "tokens", idx.numel())
        results.add(run, "width", run.model.cfg.width)
        *_, ends = run.model.states(idx)
        loss = mean(token_losses(run.model.readout(ends), targets))
        energy = Field(run.model, run.model.begin(idx), past=ends).energy(ends)
        start = {"loss": loss.value, "loss ±": loss.error, "energy": energy.mean().item()}
        results.add(run, "as it ends", start)
        line: list[dict[str, Any]] = []
        for temperature in TEMPERATURES[:: 3 if study.quick else 1]:
            line.append(heated(run, idx, targets, ends, temperature, steps))
            results.add(run, "by temperature", line)
        headings = ["T", "accepted", "rate", "energy", *line[0]["losses"], "of the mean", "±"]
        rows = [
            [
                *(e[name] for name in ("T", "accepted", "rate", "energy")),
                *e["losses"].values(),
                e["loss of the mean"],
                e["loss of the mean ±"],
            ]
            for e in line
        ]
        show(f"{run.folder.name}: heated (as it ends: {loss.value:.4f})", headings, rows)
        draw(study, run.folder.name, start, line)


def heated(
    run: Run, idx: Tensor, targets: Tensor, ends: Tensor, temperature: float, steps: int
) -> dict[str, Any]:
    """Walk from the ends, and read on the way."""
    model, x, trained = run.model, ends, run.model.cfg.steps
    field = Field(model, model.begin(idx), past=ends)
    generator = torch.Generator().manual_seed(0)
    rate, tuning = 1e-2 / temperature, steps // 4
    losses: dict[str, float] = {}
    accepted, energies, probabilities, read = [], [], torch.zeros(()), 0
    for t in track(range(1, steps + 1), f"T = {temperature:g}", transient=True):
        solver = Langevin(temperature, rate, metropolis=True, generator=generator)
        x = solver.step(field, field.look(x, trained), x, trained)
        if t <= tuning:
            rate *= 1.15 if solver.accepted[0] > ACCEPTED else 1 / 1.15
        else:
            accepted.append(solver.accepted[0])
        if t in {steps // 16, steps // 4, steps // 2, steps}:
            losses[str(t)] = mean(token_losses(model.readout(x), targets)).value
        if t > steps // 2 and t % 4 == 0:
            probabilities = probabilities + model.readout(x).softmax(-1)
            energies.append(field.energy(x).mean().item())
            read += 1
    together: Mean = mean(token_losses((probabilities / read).log(), targets))
    return {
        "T": temperature,
        "rate": rate,
        "accepted": sum(accepted) / len(accepted),
        "energy": sum(energies) / len(energies),
        "losses": losses,
        "loss of the mean": together.value,
        "loss of the mean ±": together.error,
    }


def draw(study: Study, name: str, start: dict[str, float], line: list[dict[str, Any]]) -> None:
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    temperatures = [entry["T"] for entry in line]
    for i, steps in enumerate(line[0]["losses"]):
        values = [entry["losses"][steps] for entry in line]
        left.plot(temperatures, values, "o-", color=f"C{i}", markersize=4, label=f"{steps} steps")
    together = [entry["loss of the mean"] for entry in line]
    left.plot(temperatures, together, "s--", color="black", markersize=4, label="mean of the walk")
    left.axhline(start["loss"], color="grey", linestyle=":", label="as it ends")
    left.set(xscale="log", yscale="log", xlabel="temperature", ylabel="loss (nats)")
    left.legend(fontsize=8)
    right.plot(temperatures, [entry["energy"] for entry in line], "o-", markersize=4)
    right.axhline(start["energy"], color="grey", linestyle=":", label="as it ends")
    right.set(xscale="log", xlabel="temperature", ylabel="mean energy, second half of the walk")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    save(figure, study.to / f"sampling-{name}", ("png",))
