"""One update of many models at once, against torch's optimisers and a compiler that errs."""

import copy
import warnings

import pytest
import torch

from nrgpt.train.config import OptimiserConfig
from nrgpt.train.optim import make_optimisers, set_rate
from nrgpt.train.packed_optim import Flat, PackedOptimiser, newton_schulz
from nrgpt.train.packed_step import PackedStep
from tests.models import BLOCKS, FREE, SETTLED, config, randomised, relative

VARIANTS = [
    {},
    {"mask": "inclusive"},
    {"mask": "released", "coupling": "full"},
    {"rate": "free_per_step", "feedforward": "ff1", "dropout": 0.2},
    {"rate": "state", "norm": "rmsnorm", "learn_gamma": False},
    {"rate": "free_per_term", "feedforward": "ff2"},
    {**SETTLED, **FREE, "safeguard": "cone", "prelude": 1, "prelude_loops": 2, "drive": True},
    {**SETTLED, "safeguard": "cone", "prelude": 2, "dropout": 0.2},
    {"mask": "inclusive", "safeguard": "cone"},
    *({"block": block, "dropout": 0.2} for block in BLOCKS[1:]),
]
OPTIMISERS = [
    OptimiserConfig(lr=1e-2, clip=None),
    OptimiserConfig(lr=3e-2, clip=0.1, beta1=0.8, beta2=0.95, weight_decay=0.5),
    OptimiserConfig(lr=1e-3, weight_decay=0.0),
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_updates_equal_those_of_torch(fields):
    cfg = config(**fields)
    models = [randomised(cfg).train() for _ in OPTIMISERS]
    lone = copy.deepcopy(models)
    step = PackedStep(models, OPTIMISERS)
    optimisers = [
        make_optimisers(model, own, torch.device("cpu"))
        for model, own in zip(lone, OPTIMISERS, strict=True)
    ]
    for count in range(1, 4):
        x, y = torch.randint(11, (2, 3, 2, 7))
        masks = None
        if cfg.dropout:
            masks = torch.stack([models[0].draw_masks(2, 7) for _ in OPTIMISERS])
        exits = None
        if count == 2:
            exits = torch.stack([models[0].draw_exits(x[0], 0.5, 1) for _ in OPTIMISERS])
        rates = torch.tensor([1.0, 0.5, 0.1 * count], dtype=torch.float64)
        found, fine = step(x, y, masks, exits, rates)
        assert fine.all()
        for run, (model, own) in enumerate(zip(lone, OPTIMISERS, strict=True)):
            model.zero_grad()
            drawn = {"masks": masks, "exits": exits}
            own_drawn = {name: None if v is None else v[run] for name, v in drawn.items()}
            _, loss = model(x[run], y[run], **own_drawn)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), float("inf") if own.clip is None else own.clip
            )
            set_rate(optimisers[run], rates[run].item())
            for optimiser in optimisers[run]:
                optimiser.step()
            assert abs(found[run].item() - loss.item()) < 1e-12
    for run, model in enumerate(lone):
        for name, value in model.named_parameters():
            assert relative(step.weights[name][run], value) < 1e-9, name


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "is_wrong"), [(None, False), ("rate.log_c", True)])
def test_a_pack_does_without_a_compiler_that_errs(monkeypatch, name, is_wrong, precision):
    def compiled(function, **options):
        def computed(x, y, masks, exits, steps):
            if name is None:
                return function(x, y, masks, exits, steps)
            key = f"blocks.0.{name}"
            right, step.weights[key] = step.weights[key], step.weights[key] + 0.1
            losses = function(x, y, masks, exits, steps)
            step.weights[key] = right
            return losses

        return computed if getattr(function, "__name__", "") == "losses_of_all" else function

    monkeypatch.setattr(torch, "compile", compiled)
    models = [randomised(config(rate="gamma_per_step")).float() for _ in range(2)]
    x, y = torch.randint(11, (2, 2, 3, 7))
    rates = torch.zeros(2, dtype=torch.float64)
    step = PackedStep(
        copy.deepcopy(models),
        [OptimiserConfig()] * 2,
        compile=True,
        precision=lambda: torch.autocast("cpu", dtype=precision, enabled=precision.itemsize < 4),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(x, y, None, None, rates)
    said = [str(one.message) for one in said if "go on without compilation" in str(one.message)]
    assert len(said) == is_wrong
    assert (step.losses == step.losses_of_all) == is_wrong


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9)])
def test_muon_equals_that_of_torch(shape):
    """To the rounding of bfloat16, which both compute with."""
    start, gradients = torch.randn(3, *shape), torch.randn(2, 3, *shape)
    rates = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    own = [OptimiserConfig(name="muon", muon_lr=0.1, clip=None)] * 3
    packed = PackedOptimiser({"W": start, "V": start.mT}, ["W", "V"], own)
    lone = [torch.nn.Parameter(w.clone()) for w in start]
    optimisers = [
        torch.optim.Muon([w], lr=0.1 * (run + 1), weight_decay=own[0].weight_decay)
        for run, w in enumerate(lone)
    ]
    for gradient in gradients:
        joined = packed.flat.joined([gradient, gradient.mT])
        assert packed.step(joined, torch.zeros(3), rates).all()
        for w, own_gradient, optimiser in zip(lone, gradient, optimisers, strict=True):
            w.grad = own_gradient.clone()
            optimiser.step()
    for run, w in enumerate(lone):
        moved = (w - start[run]).norm()
        assert (packed.weights["W"][run] - w).norm() < 0.02 * moved
    wide = gradients[0] if shape[0] <= shape[1] else gradients[0].mT
    singular = torch.linalg.svdvals(newton_schulz(wide).float())
    assert 0.3 < singular.min() < singular.max() < 1.6


def test_weights_side_by_side_and_back():
    """Parts that do not fill their places, and one that is turned."""
    weights = {"a": torch.randn(2, 3, 5), "b": torch.randn(2), "c": torch.randn(2, 16)}
    flat = Flat(weights)
    parts = [weights["a"].mT.contiguous().mT, weights["b"], weights["c"]]
    buffer = flat.joined(parts)
    assert buffer.shape == (2, flat.size) == (2, 48)
    views = flat.views(buffer)
    assert all(torch.equal(views[name], weight) for name, weight in weights.items())
    assert buffer.count_nonzero() == 2 * (15 + 1 + 16)
    assert torch.equal(flat.joined(parts[:1]), buffer[:, :16])
