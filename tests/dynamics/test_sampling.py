"""Samples against Boltzmann's weights that are known otherwise: by formula, or by quadrature."""

import itertools
import math

import pytest
import torch

from nrgpt.dynamics.field import Field
from nrgpt.dynamics.landscape import Flat, Sphere, TokenLandscape
from nrgpt.dynamics.relax import relax
from nrgpt.dynamics.sampling import Heat, Point, walk
from nrgpt.dynamics.solvers import Langevin
from tests.models import config, randomised


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def ends(f, surface, width, heat, *, walkers, steps):
    """The last points of independent walkers (as many samples as walkers, so errors are known), and
    the share of moves accepted."""
    start = torch.randn(walkers, width, dtype=torch.float64, generator=seeded(9))
    points, moved = zip(*itertools.islice(walk(f, surface, start, heat), steps), strict=True)
    return points[-1], torch.stack(moved).double().mean().item()


def errors_from(values, exact):
    """How many standard errors the mean of independent values is away from what it should be."""
    return abs(values.mean().item() - exact) / (values.std().item() / len(values) ** 0.5)


def mean_height(kappa, dimension):
    """Of von Mises and Fisher's weights exp(kappa cos(angle)) on the unit sphere of this dimension:
    all points at an angle are a smaller sphere."""
    angle = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    weight = (kappa * angle.cos()).exp() * angle.sin() ** (dimension - 1)
    return (weight * angle.cos()).sum().item() / weight.sum().item()


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(("width", "centred"), [(2, False), (3, False), (5, True), (9, True)])
def test_von_mises_fisher(width, centred, rate):
    """E linear in u. A large rate costs acceptance, and nothing else."""
    surface = Sphere(1.5, centred=centred)
    pull = surface.tangent(torch.zeros(width).double(), torch.ones(width).double().cumsum(0))
    pull = 2.0 * pull / pull.norm()
    heat = Heat(0.7, rate, metropolis=True, generator=seeded(width))
    steps = round(10 + 4 / rate)
    point, accepted = ends(lambda u: -u @ pull, surface, width, heat, walkers=3_000, steps=steps)
    assert 0.2 < accepted < (0.999 if rate == 0.1 else 0.95)
    height = point.u @ pull / (pull.norm() * 1.5)
    exact = mean_height(1.5 * 2.0 / 0.7, width - 1 - centred)
    assert errors_from(height, exact) < 3.5
    cool = mean_height(1.5 * 2.0 / 0.55, width - 1 - centred)
    assert errors_from(height, cool) > 3.5, "the test cannot tell one temperature from another"


def test_the_bias_of_plain_langevin_shrinks_with_the_rate():
    """In a bowl |x|^2 / 2 its variance is known, T / (1 - rate / 2), and MALA's is T."""
    bowl, variance = (lambda x: x.square().sum(-1) / 2), {}
    for rate, metropolis in itertools.product((0.1, 0.4, 0.8), (False, True)):
        heat = Heat(0.3, rate, metropolis=metropolis, generator=seeded(1))
        steps = round(8 / rate)
        point, _ = ends(bowl, Flat(), 6, heat, walkers=4_000, steps=steps)
        exact = 0.3 if metropolis else 0.3 / (1 - rate / 2)
        variance[rate, metropolis] = found = point.u.var().item()
        assert abs(found / exact - 1) < 3.5 * (2 / 24_000) ** 0.5
    assert variance[0.8, False] > 1.5 * 0.3
    assert variance[0.1, False] < 1.08 * 0.3


def landscape(norm, **fields):
    """Of the fourth token of a text: a circle, or the surface of a ball in three dimensions."""
    torch.manual_seed(3)
    model = randomised(config(width=3, norm=norm, feedforward="memory", **fields), std=1.0)
    return TokenLandscape(model, torch.randint(11, (1, 6)), token=4)


def everywhere(land, count=240):
    """Points that lie evenly on the surface by its measure, with their shares of it."""
    angle = torch.arange(count, dtype=torch.float64) * 2 * math.pi / count
    if land.surface.centred:  # a circle
        a, b = torch.tensor([[1.0, -1, 0], [1, 1, -2]], dtype=torch.float64)
        circle = angle.cos()[:, None] * a / a.norm() + angle.sin()[:, None] * b / b.norm()
        return land.surface.radius * circle
    height = (torch.arange(count, dtype=torch.float64) + 0.5) / count * 2 - 1
    z, angle = (part.flatten() for part in torch.meshgrid(height, angle, indexing="ij"))
    ring = (1 - z.square()).sqrt()
    return land.surface.radius * torch.stack([ring * angle.cos(), ring * angle.sin(), z], -1)


@pytest.mark.parametrize("fields", [{}, {"coupling": "full", "potential": "gelu"}], ids=str)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_attention_and_memory(norm, fields):
    """Energies of models, with mean energies and mean states by quadrature."""
    land = landscape(norm, **fields)
    points = everywhere(land)
    energy = land(points).detach()
    T = float(energy.std())  # lower, walkers would take long from one pit to the other
    weight = (-energy / T).softmax(0)
    heat = Heat(T, 0.8 / T, metropolis=True, generator=seeded(2))
    sampled, accepted = ends(land, land.surface, 3, heat, walkers=1_500, steps=60)
    assert 0.3 < accepted < 1
    assert errors_from(sampled.energy, (weight * energy).sum().item()) < 3.5
    for axis, mean in enumerate((weight @ points).tolist()):
        assert errors_from(sampled.u[:, axis], mean) < 3.5


def test_steps_of_half_around_are_refused():
    """At a huge temperature all points are as likely, whatever the rate."""
    surface = Sphere(1.0)
    pull = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    heat = Heat(50.0, 0.1, metropolis=True, generator=seeded())
    point, accepted = ends(lambda u: u @ pull, surface, 3, heat, walkers=3_000, steps=10)
    assert accepted < 0.5
    assert errors_from(point.u[:, 2], 0.0) < 3.5
    assert errors_from(point.u[:, 2].square(), 1 / 3) < 3.5
    here = Point(pull, torch.tensor(0.0).double(), torch.zeros(3).double())
    far = torch.tensor([math.pi, 0.0, 0.0], dtype=torch.float64)
    assert not heat.accepts(surface, here, here, far)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("metropolis", [False, True])
def test_the_solver_walks_as_walkers_in_the_landscape_do(norm, metropolis):
    """With a fixed past; of each token, the first as well. Sizes and means stay as they are."""
    model = randomised(config(width=6, norm=norm, heads=2, feedforward="memory"))
    idx = torch.randint(11, (1, 7))
    *_, past = model.states(idx)
    field = Field(model, model.begin(idx), past=past)
    x = model.begin(idx).detach()
    options = {"metropolis": metropolis, "generator": seeded(5)}
    solver = Langevin(0.3, 0.05, **options)
    # One token at a time, so that the numbers are drawn in the same order.
    for token in (0, 5):
        land = TokenLandscape(model, idx, token)
        options["generator"].manual_seed(5)
        expected = [
            (point, moved)
            for point, moved in itertools.islice(
                walk(land, land.surface, x[0, token : token + 1], Heat(0.3, 0.05, **options)), 6
            )
        ]
        options["generator"].manual_seed(5)
        field.aim(torch.tensor([[token]]))
        state = x[:, token : token + 1]
        size, mean = state.norm(), state.mean()
        for point, _ in expected:
            state = solver.step(field, field.look(state, 0), state, 0)
            u = state[0] if norm == "none" else land.surface.retract(state[0])
            assert (u - point.u).norm() < 1e-3 * point.u.norm()  # the norm's eps
        if norm != "none":
            assert abs(state.norm() / size - 1) < 1e-12
        if norm == "layernorm":
            assert abs(state.mean() - mean) < 1e-12


def test_the_solver_samples():
    """Many copies of a text at once; the mean energy of its tokens is that of the quadrature."""
    torch.manual_seed(3)
    model = randomised(config(width=3, feedforward="memory"), std=1.0)
    idx = torch.randint(11, (1, 5))
    *_, past = model.states(idx)
    land = TokenLandscape(model, idx, token=4)
    energy = land(everywhere(land)).detach()
    T = float(energy.std())
    mean = ((-energy / T).softmax(0) * energy).sum().item()
    solver = Langevin(T, 0.5 / T, metropolis=True, generator=seeded())
    many, pasts = idx.expand(700, -1), past.expand(700, -1, -1)
    found = relax(model, many, steps=40, solver=solver, past=pasts)
    energies = Field(model, model.begin(many), past=pasts).energy(found.x)
    assert errors_from(energies[:, 4], mean) < 3.5
    assert len(solver.accepted) == 40
    assert 0.2 < sum(solver.accepted) / 40 < 1


def test_without_heat_it_descends():
    land = landscape("layernorm")
    start = everywhere(land, 12)
    *_, (point, _) = itertools.islice(walk(land, land.surface, start, Heat(0.0, 1e-3)), 50)
    assert (point.energy <= land(start)).all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Heat(-1.0), "temperature = -1.0"),
        (lambda: Heat(1.0, 0.0), "rate = 0.0"),
        (lambda: Langevin(0.0, metropolis=True), "positive with metropolis"),
    ],
)
def test_mistakes(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()
