"""Optimisers, which parameters they take, and the schedule."""

import dataclasses
import itertools

import pytest
import torch

from nrgpt import LanguageModel
from nrgpt.train.config import OptimiserConfig
from nrgpt.train.optim import make_optimisers, rate_at
from nrgpt.train.packed_step import PackedStep
from nrgpt.train.updates import shape_of
from tests.runs import debug


@pytest.mark.parametrize("decay", ["cosine", "exponential", "linear", "constant"])
def test_schedule(decay):
    own = {} if decay == "constant" else {"final": 0.04}
    cfg = OptimiserConfig(warmup=10, decay=decay, **own)
    rates = [rate_at(step, 100, cfg) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[-1] == pytest.approx(1.0 if decay == "constant" else 0.04)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    middle = {"cosine": 0.52, "exponential": 0.2, "linear": 0.52, "constant": 1.0}[decay]
    assert (rates[54] + rates[55]) / 2 == pytest.approx(middle, rel=1e-3)


def test_optimisers_take_every_parameter_once_and_decay_matrices_only():
    for name in ("adamw", "muon"):
        model = LanguageModel(dataclasses.replace(debug().model, learn_gamma=False))
        optimisers = make_optimisers(model, OptimiserConfig(name=name), torch.device("cpu"))
        groups = [group for optimiser in optimisers for group in optimiser.param_groups]
        taken = [p for group in groups for p in group["params"]]
        assert len(taken) == len(set(map(id, taken)))
        assert set(map(id, taken)) == {id(p) for p in model.parameters() if p.requires_grad}
        for group in groups:
            assert all((p.dim() >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    muon = {id(p) for group in optimisers[0].param_groups for p in group["params"]}
    names = {n.rpartition(".")[2] for n, p in model.named_parameters() if id(p) in muon}
    assert names == {"W_Q", "W_K", "W_1", "W_2"}


def test_muon_takes_eta_where_asked_and_packs_say_so():
    own = OptimiserConfig(name="muon", muon_eta=True)
    model = LanguageModel(debug("model.rate=free").model)
    optimisers = make_optimisers(model, own, torch.device("cpu"))
    muon = {id(p) for group in optimisers[0].param_groups for p in group["params"]}
    names = {n.rpartition(".")[2] for n, p in model.named_parameters() if id(p) in muon}
    assert names == {"W_Q", "W_K", "W_1", "W_2", "eta"}
    assert "blocks.0.rate.eta" in PackedStep([model], [own]).optimiser.by_muon
    asked = debug("optimiser.name=muon", "optimiser.muon_eta=true", "model.rate=free_per_term")
    by_muon = PackedStep([LanguageModel(asked.model)], [own]).optimiser.by_muon
    assert {"blocks.0.rate.eta_attention", "blocks.0.rate.eta_feedforward"} <= set(by_muon)
    asked = debug("optimiser.name=muon", "optimiser.muon_eta=true")
    assert shape_of(asked) != shape_of(debug("optimiser.name=muon"))
    with pytest.raises(ValueError, match="muon_eta = True: must be False with name = 'adamw'"):
        OptimiserConfig(muon_eta=True)
    for idle in ("model.rate=free_per_step", "model.rate=identity", "model.block=gpt"):
        with pytest.raises(ValueError, match=r"optimiser\.muon_eta.*has no matrix eta"):
            debug("optimiser.name=muon", "optimiser.muon_eta=true", idle)
