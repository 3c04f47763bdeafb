"""The study of trained models runs, writes what it says, and its own helpers are right."""

import importlib
import json
import random
from pathlib import Path

import pytest
import torch

from tests.characters import character_run

STUDY = Path(__file__).parents[2] / "experiments" / "dynamics"
FIGURES = {
    "energies": 4,
    "certified": 3,
    "adaptive": 1,
    "solvers": 1,
    "avoid": 1,
    "style": 1,
    "landscape": 4,
    "meaning": 1,
    "sampling": 1,
    "readings": 0,
    "injection": 0,
}


@pytest.fixture
def study(monkeypatch):
    """The study's modules, found where they are."""
    monkeypatch.syspath_prepend(str(STUDY))
    return importlib.import_module("study")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return character_run(tmp_path_factory.mktemp("study"), iterations=30)


@pytest.mark.parametrize("part", FIGURES)
def test_every_part_runs_and_writes(part, study, run, tmp_path):
    torch.manual_seed(0)
    study.PARTS[part](study.Study((run.folder,), tmp_path, quick=True))
    found = json.loads((tmp_path / f"{part}.json").read_text())
    assert list(found) == [run.folder.name]
    assert found["run"]["checkpoint"] == run.step
    assert len(list(tmp_path.glob("*.png"))) >= FIGURES[part]
    if part == "adaptive":
        all_steps = found["run"]["points"]["the same for all"][-1]
        assert all_steps["more"] == 0
        assert all_steps["mean_steps"] == run.model.cfg.steps
        assert all(p["mean_steps"] <= 3 for p in found["run"]["points"]["kl"])


def test_all_parts_are_tested(study):
    assert set(study.PARTS) == set(FIGURES)


def test_letters_that_complete_words(study):
    symbols = sorted(set("abcdefghijklmnopqrstuvwxyzTHOU .'"))
    found = study.steering.completing("tho, Tho bethou th thous", ["thou", "the"], symbols)
    u, e = [symbols.index("u"), symbols.index("U")], [symbols.index("e")]
    assert found == {1: e, 2: u, 6: e, 7: u, 17: e, 20: e, 21: u}


def test_the_regulariser_of_words_is_a_gradient_and_leaves_the_rest_alone(study, run):
    model = run.model.double()
    idx = torch.randint(100, (2, 6))
    allowed = torch.ones(2, 6, 100, dtype=torch.bool)
    allowed[0, 2, :50] = False
    allowed[1, 5, 7] = False
    term = study.steering.AllowedNext(model, allowed, 1.7)
    *_, x = model.states(idx)
    g = model.energy_block.norm(x).detach()
    exact = -torch.func.grad(lambda g: term.energy(g, None).sum())(g)
    force = term.force(g, None)
    assert exact.norm() > 1e-3
    assert (force - exact).norm() < 1e-9 * exact.norm()
    free = allowed.all(-1)
    assert force[free].abs().max() < 1e-12
    p = model.readout(x).softmax(-1)
    expected = -1.7 * (p * allowed).sum(-1).log()
    assert (term.energy(g, None) - expected).abs().max() < 1e-4  # norm_eps of two norms
    model.float()


def test_shuffled_words_keep_everything_but_their_order(study):
    text = "To be, or not to be:\nthat is the question"
    found = study.meaning.shuffled_words(text, random.Random(0))
    assert found != text
    assert sorted(found) == sorted(text)
    assert sorted(found.replace(",", "").replace(":", "").split()) == sorted(
        text.replace(",", "").replace(":", "").split()
    )


def test_windows_are_the_split(study, run):
    stream = run.dataset().tokens("val")
    every = study.motion.windows(run, None)
    assert torch.equal(every[1], torch.from_numpy(stream.read(48, 49)))
    few = study.motion.windows(run, 3 * 48)
    assert len(few) == 3
    assert torch.equal(few[0], every[0])


def test_errors_are_those_of_texts(study):
    values = torch.tensor([[1.0, 3.0], [4.0, 6.0], [0.0, 1.0]])
    found = study.motion.mean(values)
    assert found.value == pytest.approx(2.5)
    assert found.error == pytest.approx(torch.tensor([2.0, 5.0, 0.5]).std().item() / 3**0.5)
