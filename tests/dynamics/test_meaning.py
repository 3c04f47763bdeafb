"""Signals, correlations and detection."""

import pytest
import torch

from nrgpt.dynamics.meaning import (
    auroc,
    average_ranks,
    correlations,
    corrupted,
    detection,
    rank_correlation,
    signals,
)
from nrgpt.model.energy import ENERGIES
from tests.models import config, randomised

scipy_stats = pytest.importorskip("scipy.stats")


def test_ranks_and_their_correlation():
    a, b = torch.randint(9, (2, 50))  # many ties
    expected = torch.from_numpy(scipy_stats.rankdata(a.numpy()))
    assert torch.equal(average_ranks(a.double()), expected)
    expected = scipy_stats.spearmanr(a.numpy(), b.numpy()).statistic
    assert abs(rank_correlation(a, b) - expected) < 1e-12


def test_auroc():
    strange, familiar = torch.randint(9, (20,)).double() + 1, torch.randint(9, (30,)).double()
    wins = (strange[:, None] > familiar).double() + 0.5 * (strange[:, None] == familiar).double()
    assert abs(auroc(strange=strange, familiar=familiar) - wins.mean().item()) < 1e-12
    assert auroc(strange=torch.ones(3), familiar=torch.zeros(4)) == 1
    assert auroc(strange=torch.ones(3), familiar=torch.ones(4)) == 0.5


def test_signals_of_a_model():
    model = randomised(config())
    idx = torch.randint(11, (4, 8))
    found = signals(model, idx[:, :-1])
    *_, x = model.states(idx[:, :-1])
    assert torch.allclose(found["energy"], sum(model.energies(x).values()))
    assert all(value.shape == (4, 7) for value in found.values())
    ranked = correlations(model, idx[:, :-1], idx[:, 1:])
    assert {c.signal for c in ranked} == set(found)
    assert all(-1 <= c.rank <= 1 for c in ranked)
    sizes = [abs(c.rank) for c in ranked]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("terms", [("attention",), ("attention", "feedforward", "again")])
def test_signals_follow_the_terms_of_a_model(terms, monkeypatch):
    monkeypatch.setitem(ENERGIES, "again", ENERGIES["memory"])
    found = signals(randomised(config(terms=terms, hidden_factor=4)), torch.randint(11, (4, 8)))
    own = [f"{term} energy" for term in terms]
    assert list(found)[: len(terms) + 1] == ["energy", *own]
    assert torch.allclose(found["energy"], sum(found[name] for name in own))


def test_detection_of_what_is_really_different():
    model = randomised(config())
    familiar = torch.randint(0, 3, (40, 9))
    strange = corrupted(familiar, 1.0, 11, torch.Generator().manual_seed(0))
    best = detection(model, familiar, strange)[0]
    assert abs(best.auroc - 0.5) > 0.15
    same = detection(model, familiar, familiar)
    assert all(abs(d.auroc - 0.5) < 1e-12 for d in same)
    half = corrupted(familiar, 0.5, 11, torch.Generator().manual_seed(0))
    assert 0.3 < (half != familiar).double().mean() < 0.6
    with pytest.raises(ValueError, match="share = 2"):
        corrupted(familiar, 2, 11, torch.Generator())
