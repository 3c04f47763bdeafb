"""Solvers and stopping rules against plain loops over whole states."""

import itertools

import pytest
import torch

from nrgpt.dynamics.adaptive import stream_adaptive
from nrgpt.dynamics.convergence import transients
from nrgpt.dynamics.descent import check_descent
from nrgpt.dynamics.field import Field
from nrgpt.dynamics.relax import Stop, relax
from nrgpt.dynamics.solvers import SOLVERS, Anderson, Backtracking, Momentum
from tests.dynamics.test_convergence import bowl
from tests.models import COUPLINGS, RATES, config, forces, randomised, relative

MODELS = [
    *({"coupling": coupling} for coupling in COUPLINGS),
    *({"rate": rate} for rate in RATES),
    *({"feedforward": name, "bias": True} for name in ("ff1", "ff2", "memory")),
]


def made(**fields):
    model = randomised(config(context=17, **fields), std=0.2)
    return model, torch.randint(11, (3, 15))


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_plain_steps_are_the_models_own(fields):
    model, idx = made(**fields)
    *_, last = model.states(idx, steps=5)
    found = relax(model, idx, steps=5)
    assert relative(found.x, last) < 1e-12
    assert (found.steps == 5).all()
    assert found.computed == 5 * idx.numel()


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_the_field_is_that_of_the_model(fields):
    """For all tokens together, and for some of them alone."""
    model, idx = made(**fields)
    *_, x = model.states(idx, steps=2)
    energy = sum(model.energies(x).values())
    force = sum(forces(model, x).values())
    field = Field(model, model.begin(idx), past=x)
    look = field.look(x, 0)
    assert relative(look.energy, energy) < 1e-12
    assert relative(look.force, force) < 1e-12
    positions = torch.tensor([[0, 3], [14, 2], [7, 15]])  # 15 fills a row
    field.aim(positions)
    rows = torch.arange(3)[:, None]
    real = positions < 15
    look = field.look(x[rows, positions.clamp(max=14)], 0)
    assert relative(look.energy[real], energy[rows, positions.clamp(max=14)][real]) < 1e-12
    assert relative(look.force[real], force[rows, positions.clamp(max=14)][real]) < 1e-12


def by_hand(model, idx, stop, steps):
    """The same by whole passes, in which tokens that rest are put back where they were."""
    x = model.embed(idx)
    arrived = torch.zeros_like(idx, dtype=torch.bool)
    held, taken = torch.zeros_like(idx), torch.zeros_like(idx)
    plan, before = model.energy_block.plan(), None
    for t in range(steps):
        look = plan.observe(x, t)
        energy, force = look.energy, look.force.norm(dim=-1)
        log_p = model.readout(x).log_softmax(-1)
        holds = torch.zeros_like(arrived)
        if stop.rule == "force":
            holds = force <= stop.tolerance
        elif stop.rule == "entropy":
            holds = torch.distributions.Categorical(logits=log_p).entropy() <= stop.tolerance
        elif before is not None and stop.rule == "energy":
            holds = (energy - before[0]).abs() <= stop.tolerance * energy.abs().clamp(min=1)
        elif before is not None and stop.rule == "kl":
            kl = torch.nn.functional.kl_div(before[1], log_p, reduction="none", log_target=True)
            holds = kl.sum(-1) <= stop.tolerance
        elif before is not None and stop.rule == "argmax":
            holds = log_p.argmax(-1) == before[1].argmax(-1)
        held = torch.where(holds, held + 1, 0)
        arrived = arrived | ((held >= stop.patience) & (t >= stop.minimum))
        moved = plan.move(x, t)
        x = torch.where(arrived.unsqueeze(-1), x, moved)
        taken = torch.where(arrived, taken, t + 1)
        before = energy, log_p
    return x, taken


@pytest.mark.parametrize(
    "stop",
    [
        Stop("energy", 0.05),
        Stop("energy", 0.1, patience=2),
        Stop("force", 3.0, minimum=2),
        Stop("entropy", 2.0),
        Stop("kl", 0.02),
        Stop("argmax", patience=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("fields", [{}, {"coupling": "full", "rate": "gamma_per_step"}], ids=str)
def test_tokens_rest_one_by_one(stop, fields):
    model, idx = made(**fields)
    with torch.no_grad():
        x, taken = by_hand(model, idx, stop, 9)
    found = relax(model, idx, steps=9, stop=stop)
    assert torch.equal(found.steps, taken)
    assert relative(found.x, x) < 1e-10
    assert len(taken.unique()) > 1, "all tokens took as many steps: choose another tolerance"
    # Only tokens on their way are computed; rows are filled up to the longest of them.
    assert found.computed == sum(3 * int((taken > t).sum(1).max()) for t in range(9))


def test_backtracking_never_raises_an_energy_in_a_fixed_field():
    model, idx = made(rate="free", rate_init="random", rate_scale=200.0)
    *_, past = model.states(idx)
    plain, careful = [], []
    for steps in range(1, 8):
        for solver, energies in ((None, plain), (Backtracking(), careful)):
            x = relax(model, idx, steps=steps, solver=solver, past=past).x
            energies.append(Field(model, model.begin(idx), past=past).energy(x))
    rises = [b > a + 1e-12 for a, b in itertools.pairwise(careful)]
    assert not torch.stack(rises).any()
    assert torch.stack([b > a for a, b in itertools.pairwise(plain)]).any()


def quadratic(D=9):
    """A landscape whose answer is known: E = g A g / 2 - b g without a norm, and no attention."""
    from nrgpt import EnergyTerm

    class Bowl(EnergyTerm):
        def __init__(self):
            super().__init__()
            spread = torch.randn(D, D, dtype=torch.float64)
            self.A = spread @ spread.T / D + 0.1 * torch.eye(D, dtype=torch.float64)
            self.b = torch.randn(D, dtype=torch.float64)

        def energy(self, z, keys):
            return ((z @ self.A) * z).sum(-1) / 2 - z @ self.b

    model = randomised(config(context=17, norm="none", rate="scalar", rate_scale=0.2), std=0.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "terms" in name:
                p.zero_()  # nothing but the bowl
    bowl = Bowl()
    return model, bowl, torch.linalg.solve(bowl.A, bowl.b)


@pytest.mark.parametrize(
    ("solver", "steps"),
    [(None, 400), (Momentum(0.8), 150), (Anderson(5), 25), (Backtracking(), 400)],
)
def test_every_solver_finds_the_bottom_of_a_bowl(solver, steps):
    model, bowl, bottom = quadratic()
    idx = torch.randint(11, (2, 7))
    with torch.no_grad():
        model.energy_block.rate.log_c.fill_(-1.0)
    found = relax(model, idx, steps=steps, solver=solver, extra={"bowl": bowl})
    assert (found.x - bottom).norm(dim=-1).max() < 1e-2 * bottom.norm()
    if isinstance(solver, Momentum | Anderson):  # they are there to be faster
        plain = relax(model, idx, steps=steps, extra={"bowl": bowl})
        assert (found.x - bottom).norm() < 0.5 * (plain.x - bottom).norm()


def test_mistakes():
    model, idx = made()
    for wrong, said in (
        (lambda: Stop("enery"), "did you mean 'energy'"),
        (lambda: Stop("energy", -1.0), "tolerance = -1.0"),
        (lambda: Stop("energy", patience=0), "patience = 0"),
        (lambda: Backtracking(shrink=1.0), "shrink = 1.0"),
        (lambda: Momentum(1.0), "mu = 1.0"),
        (lambda: relax(model, idx, steps=0), "steps = 0"),
        (lambda: relax(randomised(config(mask="inclusive")), idx[:, :9]), "this needs mask"),
        (lambda: relax(randomised(config(block="rgpt")), idx[:, :9]), "has no energy"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()


def test_anderson_survives_parallel_moves_in_float32():
    """In a round bowl all moves are parallel: the mixing is not unique, and every one leads to the
    bottom."""
    model, extra = bowl(*[0.1] * 5)
    term = extra["bowl"]
    term.k, term.a = term.k.float(), term.a.float()
    idx = torch.randint(11, (3, 5))
    x = relax(model.float(), idx, steps=12, solver=Anderson(5), extra=extra).x
    assert (x - term.a).abs().max() < 1e-5
    plain = relax(model, idx, steps=12, extra=extra).x
    assert (plain - term.a).abs().max() > 1


@pytest.mark.parametrize("name", ["momentum", "anderson"])
def test_a_solver_may_be_used_again(name):
    model = randomised(config())
    solver, idx = SOLVERS[name](), torch.randint(11, (2, 7))
    first = relax(model, idx, steps=5, solver=solver).x
    relax(model, torch.randint(11, (3, 9)), steps=5, solver=solver)
    assert torch.equal(relax(model, idx, steps=5, solver=solver).x, first)


def test_under_autocast_all_is_computed_in_the_weights_precision():
    model, idx = made()
    model = model.float()
    plain = relax(model, idx).x, check_descent(model, idx), transients(model, idx, steps=3).moves
    new = list(stream_adaptive(model, idx[:, :3].tolist(), Stop("kl", 0.1), max_new_tokens=4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(relax(model, idx).x, plain[0])
        assert transients(model, idx, steps=3).moves.equal(plain[2])
        assert check_descent(model, idx).parallel == plain[1].parallel
        stop = Stop("kl", 0.1)
        assert new == list(stream_adaptive(model, idx[:, :3].tolist(), stop, max_new_tokens=4))
