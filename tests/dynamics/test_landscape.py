"""Landscape tools on landscapes whose answers are known, and on a model's."""

import pytest
import torch

from nrgpt.dynamics.figures import save
from nrgpt.dynamics.landscape import (
    Flat,
    Sphere,
    TokenLandscape,
    gradient,
    hessian_product,
    lowest_curvatures,
    minimise,
    saddle,
)
from nrgpt.dynamics.paths import basins, escape_times, least_energy_path, plane
from nrgpt.dynamics.plots import path_figure, slice_figure
from tests.models import COUPLINGS, NORMS, config, randomised, relative

LAMBDA = torch.tensor([1.0, 2.0, 4.0, 7.0, 11.0, 16.0], dtype=torch.float64)


def quadratic(u):
    """On a sphere: minima +-e_0, saddles +-e_k of index k with curvatures lambda_i - lambda_k."""
    return (LAMBDA * u.square()).sum(-1) / 2


def double_well(u):
    """Minima at (+-1, 0), a saddle between them at (0, 0), one higher."""
    return (u[:, 0].square() - 1).square() + 2 * u[:, 1].square()


def points(count, D=6):
    return torch.randn(count, D, dtype=torch.float64)


def test_minima_on_a_sphere():
    sphere = Sphere(2.0)
    found = minimise(quadratic, sphere, points(7), iterations=2_000)
    assert (found.u.norm(dim=-1) - 2).abs().max() < 1e-12
    assert (found.u[:, 0].abs() - 2).abs().max() < 1e-6
    assert (found.energy - 2.0).abs().max() < 1e-9
    assert found.slope.max() < 1e-5


def test_curvatures_on_a_sphere():
    sphere = Sphere(2.0)
    for k in range(6):
        u = torch.zeros(6, dtype=torch.float64)
        u[k] = 2.0
        values, directions = lowest_curvatures(quadratic, sphere, u, 5)
        expected = torch.cat([LAMBDA[:k], LAMBDA[k + 1 :]]) - LAMBDA[k]
        assert (values - expected).abs().max() < 1e-8
        assert int((values < 0).sum()) == k
        assert (directions @ u).abs().max() < 1e-8


@pytest.mark.parametrize("index", [1, 2, 3])
def test_saddles_and_their_index(index):
    near = torch.zeros(6, dtype=torch.float64)
    near[index] = 2.0
    u, curvatures = saddle(quadratic, Sphere(2.0), near + 0.3 * points(1)[0], index=index)
    assert abs(abs(u[index].item()) - 2) < 1e-5
    assert int((curvatures < 0).sum()) == index


def test_a_path_and_its_barrier():
    ends = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    path = least_energy_path(double_well, Flat(), *ends, images=21)
    assert abs(path.barrier - 1) < 1e-3
    assert path.points[:, 1].abs().max() < 0.02
    gaps = path.points.diff(dim=0).norm(dim=-1)
    assert gaps.max() < 1.1 * gaps.min()
    # On the sphere, from e_0 to -e_0, the pass leads over e_1.
    a = torch.zeros(6, dtype=torch.float64)
    a[0] = 2.0
    path = least_energy_path(quadratic, Sphere(2.0), a, -a, images=21, iterations=2_000)
    assert abs(path.barrier - 2 * (LAMBDA[1] - LAMBDA[0]).item()) < 0.02


def test_basins():
    found = basins(double_well, Flat(), points(40, 2))
    assert len(found.minima) == 2
    assert found.counts.sum() == 40
    assert found.energy.max() < 1e-8
    for name, minimum in enumerate(found.minima):
        assert abs(abs(minimum[0].item()) - 1) < 1e-3
        assert int((found.of_start == name).sum()) == int(found.counts[name])


def test_escapes_need_heat():
    minimum = torch.tensor([1.0, 0.0], dtype=torch.float64)
    options = {"walkers": 16, "steps": 400, "rate": 0.02}
    cold, warm, hot = (
        escape_times(
            double_well,
            Flat(),
            minimum,
            temperature=T,
            generator=torch.Generator().manual_seed(1),
            **options,
        )
        for T in (0.0, 0.4, 3.0)
    )
    assert cold.isinf().all()
    assert hot.isfinite().all()
    assert hot.median() < warm.median()


def test_a_plane():
    centre = torch.tensor([0.5, 0.0], dtype=torch.float64)
    first, second = torch.eye(2, dtype=torch.float64)
    found = plane(double_well, Flat(), centre, first, second, extent=1.0, count=5)
    at = centre + torch.tensor([0.5, -1.0], dtype=torch.float64)
    assert abs(found.energy[0, 3] - double_well(at[None])[0]) < 1e-12
    assert (found.place(at[None]) - torch.tensor([[0.5, -1.0]])).abs().max() < 1e-12


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_landscape_of_a_token(norm, coupling):
    exactly = {} if norm == "none" else {"norm_eps": 0.0}
    model = randomised(config(norm=norm, coupling=coupling, **exactly), std=0.3)
    idx = torch.randint(11, (1, 9))
    land = TokenLandscape(model, idx, token=6)
    *_, x = model.states(idx)
    end = land.trajectory()[-1:]
    assert relative(land(end), sum(model.energies(x).values())[:, 6]) < 1e-10
    # The slope along the surface, against differences of f.
    u, v = land.random_points(1), points(1, 9)
    v = land.surface.tangent(u, v)
    step = 1e-5
    ahead, behind = (land(land.surface.retract(u + s * step * v)) for s in (1, -1))
    slope = (gradient(land, land.surface, u) * v).sum()
    assert abs(((ahead - behind) / (2 * step)).item() - slope.item()) < 1e-5 * (1 + slope.abs())
    # And the second derivative along it: on a sphere the way u + s v is bent onto it, which only
    # changes second order terms that the surface's curvature accounts for.
    middle = land(u)
    second = ((ahead - 2 * middle + behind) / step**2).item()
    found = (hessian_product(land, land.surface, u[0], v[0]) @ v[0]).item()
    assert abs(second - found) < 1e-3 * (1 + abs(found))


def test_curvatures_of_a_token_are_those_of_the_whole_hessian():
    model = randomised(config(norm_eps=0.0), std=0.3)
    land = TokenLandscape(model, torch.randint(11, (1, 9)), token=6)
    u = land.trajectory()[-1]
    columns = [
        hessian_product(land, land.surface, u, land.surface.tangent(u, v))
        for v in torch.eye(9).double()
    ]
    every = torch.linalg.eigvalsh(torch.stack(columns).detach())
    assert land(land.random_points(5)).shape == (5,)  # another number of points in between
    lowest, _ = lowest_curvatures(land, land.surface, u, 3)
    expected = every[every.abs() > 1e-9][:3]  # across the surface there is none
    assert relative(lowest, expected) < 1e-6


def test_straight_ways_on_a_sphere():
    sphere = Sphere(3.0, centred=True)
    u, other = sphere.retract(points(1, 9))[0], sphere.retract(points(20, 9))
    heading = sphere.heading(u, other)
    assert (heading @ u).abs().max() < 1e-12
    assert (sphere.walk(u, heading) - other).norm(dim=-1).max() < 1e-12
    angles = torch.acos(other @ u / 9)
    assert (heading.norm(dim=-1) - 3 * angles).abs().max() < 1e-7
    assert sphere.heading(u, u).abs().max() == 0
    assert torch.equal(sphere.walk(u, torch.zeros(9).double()), u)


def test_a_plane_on_a_sphere_shows_energies_where_points_are():
    sphere = Sphere(2.0)
    centre, a, b = sphere.retract(points(3, 5))

    def height(u):
        return u[..., 0] + 2 * u[..., 1]

    found = plane(
        height, sphere, centre, sphere.heading(centre, a), sphere.heading(centre, b), extent=3.0
    )
    for point in (a, b):
        x, y = found.place(point)
        assert abs(float(x.square() + y.square()) ** 0.5 - sphere.heading(centre, point).norm()) < (
            1e-12
        )
        walked = sphere.walk(centre, torch.stack([x, y]) @ found.directions)
        assert (walked - point).norm() < 1e-12
    row, column = 7, 30
    v = torch.stack([found.axis[column], found.axis[row]]) @ found.directions
    assert abs(height(sphere.walk(centre, v)) - found.energy[row, column]) < 1e-12


def test_figures(tmp_path):
    model = randomised(config())
    land = TokenLandscape(model, torch.randint(11, (1, 9)), token=6)
    way = land.trajectory()
    found = basins(land, land.surface, land.random_points(6), iterations=100)
    first, second = way[-1] - way[0], found.minima[0] - way[-1]
    cut = plane(land, land.surface, way[-1], first, second, extent=3.0, count=9)
    path = least_energy_path(land, land.surface, way[-1], found.minima[0], images=5, iterations=5)
    for name, figure in (
        ("slice", slice_figure(cut, way, found.minima)),
        ("path", path_figure(path)),
    ):
        (file,) = save(figure, tmp_path / name, ("png",))
        assert file.stat().st_size > 5_000


def test_mistakes():
    model = randomised(config())
    with pytest.raises(ValueError, match="one text"):
        TokenLandscape(model, torch.randint(11, (2, 7)), token=1)
    with pytest.raises(ValueError, match="token = 7"):
        TokenLandscape(model, torch.randint(11, (1, 7)), token=7)
    with pytest.raises(ValueError, match="radius = 0"):
        Sphere(0)
    with pytest.raises(ValueError, match="has no energy"):
        TokenLandscape(randomised(config(block="gpt")), torch.randint(11, (1, 7)), token=1)
