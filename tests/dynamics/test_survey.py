"""Surveys of a token's landscape, and the same model under other conditions."""

import pytest
import torch

import nrgpt
from nrgpt.dynamics.altered import altered
from nrgpt.dynamics.landscape import TokenLandscape
from nrgpt.dynamics.survey import survey

from ..models import BLOCKS, NORMS, RATES, config, randomised, tokens


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "none"])
def test_a_survey_is_of_this_landscape(norm):
    cfg = config(norm=norm, feedforward="memory", rate="gamma")
    model, (idx, _) = randomised(cfg), tokens(cfg, batch=1)
    found = survey(model, idx, 5, starts=6, count=7)
    land = TokenLandscape(model, idx, 5)
    assert torch.allclose(found.way_energy, land(land.trajectory()))
    assert torch.equal(found.starts[0], found.way[-1])
    for start, basin in zip(found.start_energy, found.found.of_start, strict=True):
        assert found.found.energy[basin] <= start + 1e-9
    assert int(found.found.counts.sum()) == 8
    for cut in found.sections.values():  # centred on the end of the way
        assert torch.allclose(cut.energy[3, 3], found.way_energy[-1])
    both = [found.way[0], found.found.minima[found.below]]  # in the plane: as far there as anywhere
    for u, at in zip(both, found.sections["path"].place(torch.stack(both)), strict=True):
        assert torch.allclose(at.norm(), land.surface.heading(found.way[-1], u).norm())
    assert ("minima" in found.sections) == (len(found.found.energy) > 1)
    said = model.readout(found.found.minima).argmax(-1)
    assert torch.equal(found.said[1:, 0], said)
    if found.saddle_energy is not None:
        ends = found.found.energy[found.shown]
        assert found.saddle_energy >= ends.max() - 1e-6
    record = found.record()
    assert len(record["starts"]) == 8
    for name, section in record["sections"].items():
        assert [m["which"] for m in section["minima"]] == (
            found.shown if name == "minima" else [found.below]
        )
    assert sum(m["count"] for m in record["minima"]) == 8
    assert len(found.rows()) == 1 + len(found.found.energy)


def test_a_survey_without_a_norm_and_one_of_the_first_token():
    """Its energy is flat where a token sees nobody: a minimum everywhere."""
    cfg = config(norm="none", terms=("attention",), hidden_factor=4)
    model, (idx, _) = randomised(cfg), tokens(cfg, batch=1)
    assert survey(model, idx, 0, starts=1, count=3).way.shape == (4, 9)


@pytest.mark.parametrize("rate", RATES)
def test_longer_steps(rate):
    """The first step is twice as long, whatever eta is."""
    cfg = config(rate=rate, norm="layernorm")
    model, (idx, _) = randomised(cfg), tokens(cfg)
    start, plain = list(model.states(idx, steps=1))
    _, quick = list(altered(model, rate=2.0).states(idx, steps=1))
    assert torch.allclose(quick - start, 2 * (plain - start))


@pytest.mark.parametrize("block", BLOCKS)
def test_sharper_attention(block):
    """As if the scores had been scaled."""
    cfg = config(block=block, beta=0.6)
    model, (idx, _) = randomised(cfg), tokens(cfg)
    other = nrgpt.LanguageModel(config(block=block, beta=1.2)).double()
    other.load_state_dict(model.state_dict())
    assert torch.allclose(altered(model, beta=2.0)(idx)[0], other(idx)[0])


def test_the_safeguard_can_be_turned_on_and_off():
    cfg = config(feedforward="memory", rate="free")
    model, (idx, _) = randomised(cfg), tokens(cfg)
    kept = altered(model, cone=True)
    assert not model.energy_block.safeguard
    assert not torch.allclose(kept(idx)[0], model(idx)[0])
    assert torch.equal(altered(kept, cone=False)(idx)[0], model(idx)[0])
    assert altered(model) is model
    with pytest.raises(ValueError, match="rate = 0"):
        altered(model, rate=0)
