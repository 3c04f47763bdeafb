"""The formula against PyTorch's counter."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nrgpt import LanguageModel
from nrgpt.model.energy import ENERGIES
from nrgpt.model.flops import flops_per_token, parts_per_step
from tests.models import BLOCKS, COUPLINGS, DESCENDING, MASKS, RATES, config

VARIANTS = [
    *({"mask": m, "coupling": c} for m, c in itertools.product(MASKS, COUPLINGS)),
    *({"rate": rate} for rate in RATES),
    {"rate": "psd_skew", "rate_rank": 5},
    {"rate": "psd_skew_per_step", "rate_rank": 5},
    *({"feedforward": name, "hidden_factor": 3} for name in ("ff1", "ff2w", "ff2", "memory")),
    *({"block": block, "hidden_factor": 3} for block in BLOCKS),
    {"norm": "none"},
    *DESCENDING,
    {"safeguard": "cone"},
    {"safeguard": "cone", "rate": "free_per_term"},
    {"tied": False, "bias": True, "head_bias": True},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_formula_equals_the_counter(fields, batch):
    cfg = config(**fields)
    with torch.device("meta"):
        model = LanguageModel(cfg)
        idx = torch.zeros(batch, 13, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            _, loss = model(idx, idx)
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            _, loss = model(idx, idx)
            loss.backward()
        both = counter.get_total_flops()
    options = {"tokens": 13, "batch": batch}
    assert flops_per_token(cfg, training=False, **options) * batch * 13 == pytest.approx(forward)
    assert flops_per_token(cfg, **options) * batch * 13 == pytest.approx(both)


def test_the_papers_claims_about_flops():
    """FF2W has twice the FLOPs of a transformer's feed-forward part at the same parameters, FF1
    (hidden 8 D) too; full-rank heads cost more the more of them there are."""
    sizes = {"width": 768, "heads": 12, "hidden_factor": 4}
    gpt = parts_per_step(config(block="rgpt_parallel", **sizes), 1)
    ff2w = parts_per_step(config(**sizes), 1)
    ff1 = parts_per_step(config(feedforward="ff1", **{**sizes, "hidden_factor": 8}), 1)
    full = parts_per_step(config(coupling="full", **sizes), 1)
    assert ff2w["feedforward"] == ff1["feedforward"] == 2 * gpt["feedforward"]
    assert ff2w["attention"] < gpt["attention"] < full["attention"] / 5


def test_an_energy_of_ones_own_is_counted(monkeypatch):
    monkeypatch.setitem(ENERGIES, "mine", ENERGIES["ff1"])
    assert flops_per_token(config(feedforward="mine")) == flops_per_token(config(feedforward="ff1"))
    three = parts_per_step(config(terms=("attention", "feedforward", "mine")), 13)
    assert three["mine"] == parts_per_step(config(feedforward="ff1"), 13)["feedforward"]
