"""A first look at two small ListOps models: python look.py RUN FOLDER_FOR_FIGURES."""

import sys
from pathlib import Path

import torch

from nrgpt.dynamics.adaptive import loss_against_steps
from nrgpt.dynamics.figures import save
from nrgpt.dynamics.landscape import TokenLandscape, gradient, lowest_curvatures, minimise
from nrgpt.dynamics.meaning import correlations, corrupted, detection
from nrgpt.dynamics.paths import basins, plane
from nrgpt.dynamics.plots import slice_figure
from nrgpt.dynamics.relax import Stop
from nrgpt.train.runs import load_run

torch.manual_seed(0)
run, figures = Path(sys.argv[1]), Path(sys.argv[2])
loaded = load_run(run)
model, stream = loaded.model, loaded.dataset().tokens("val")
text = torch.stack([torch.from_numpy(stream.read(i * 65, 65)) for i in range(200)])
idx, targets = text[:, :-1], text[:, 1:]

print(model.double().certificate(idx=idx[:20]))
model.float()
for steps in (1, 2, 3, 4, 5, 6, 8, 10):
    print(f"loss with {steps} steps: {model(idx, targets, steps=steps)[1].item():.4f}")
for rule in ("kl", "energy", "entropy"):
    stops = [Stop(rule, tolerance) for tolerance in (1e-4, 1e-3, 1e-2, 1e-1)]
    for cost in loss_against_steps(model, idx, targets, stops)[1:]:
        print(f"{rule} {cost.stop.tolerance:g}: loss {cost.loss:.4f}, {cost.mean_steps:.2f} steps")
for found in correlations(model, idx, targets):
    print(f"rank correlation with the loss: {found.signal} {found.rank:+.3f}")
generator = torch.Generator().manual_seed(0)
for share in (0.02, 0.1):
    strange = corrupted(idx, share, model.cfg.vocab_size, generator)
    for found in detection(model, idx, strange):
        print(f"AUROC, {100 * share:.0f} % of tokens changed: {found.signal} {found.auroc:.3f}")

land = TokenLandscape(model.double(), torch.from_numpy(stream.read(0, 64))[None], token=40)
way = land.trajectory()
print("energies along the way, frozen past:", [round(value, 1) for value in land(way).tolist()])
print(f"slope at the end: {gradient(land, land.surface, way[-1:]).norm().item():.2f}")
print("lowest curvatures there:", lowest_curvatures(land, land.surface, way[-1], 3)[0].tolist())
nearest = minimise(land, land.surface, way[-1:], iterations=2_000)
distance = (nearest.u - way[-1:]).norm().item()
print(f"minimum below it: {nearest.energy.item():.1f}, {distance:.2f} away (radius 8)")
starts = torch.cat([land.random_points(100), way[-1:]])
pits = basins(land, land.surface, starts, iterations=1_500, distance=0.02)
print("basins of 100 random starts and the end:", pits.counts.tolist(), pits.energy.tolist())
other = pits.minima[-1] - nearest.u[0]
other = other if other.norm() > 1e-3 else torch.randn_like(other)
cut = plane(land, land.surface, nearest.u[0], way[-1] - nearest.u[0], other, extent=9.0, count=61)
save(slice_figure(cut, way, pits.minima[:5]), figures / f"{run.name}-slice", ("png",))
