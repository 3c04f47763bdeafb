"""Descent on data, certified presets, and a random number of steps in training."""

import pytest
import torch

from nrgpt import LanguageModel
from nrgpt.dynamics.descent import check_descent
from nrgpt.train import loop
from nrgpt.train.presets import PRESETS
from tests.models import config, randomised
from tests.runs import debug, final_weights, same

CERTIFIED = {"feedforward": "memory", "rate": "gamma_per_step", "learn_alpha": False}


@pytest.mark.parametrize("coupling", ["low_rank", "full"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_certified_model_goes_down_with_a_frozen_past(coupling, norm):
    model = randomised(config(coupling=coupling, norm=norm, steps=12, **CERTIFIED))
    certificate = model.certificate(idx=torch.randint(11, (4, 13)))
    assert certificate
    assert certificate.check.frozen.relative < 1e-10
    assert certificate.check.frozen.share == 0
    assert "frozen past" in str(certificate)


def test_others_may_rise_and_the_place_is_named():
    model = randomised(config(feedforward="ff2w", steps=12), std=0.6)
    idx = torch.randint(11, (4, 13))
    found = check_descent(model, idx)
    assert found.frozen.relative > 1e-3
    assert found.frozen.share > 0
    # The rise in parallel, once more, by hand.
    energies = torch.stack([sum(model.energies(x).values()) for x in model.states(idx)])
    rise = energies.diff(dim=0) / torch.maximum(energies[1:].abs(), energies[:-1].abs()).clamp(
        1e-300
    )
    worst = found.parallel
    assert abs(rise.max().item() - worst.relative) < 1e-9
    assert abs(rise[worst.step, worst.sample, worst.token].item() - worst.relative) < 1e-9
    assert f"token {worst.token} of sample {worst.sample}, step {worst.step}" in str(worst)


def test_masks_without_a_field_say_so():
    with pytest.raises(ValueError, match="this needs mask = 'strict'"):
        check_descent(randomised(config(mask="inclusive")), torch.randint(11, (2, 7)))


@pytest.mark.parametrize("task", ["listops", "shakespeare", "owt"])
def test_the_certified_presets_are_certified_whatever_they_learn(task):
    cfg = PRESETS[f"{task}_nrgpt_certified"]()
    small = {
        **vars(cfg.model),
        "width": 16,
        "heads": 2,
        "vocab_size": 11,
        "context": 13,
        "steps": 3,
    }
    model = randomised(type(cfg.model)(**small), std=1.0)
    assert model.certificate()


def test_training_with_a_random_number_of_steps(tmp_path, monkeypatch):
    taken = []
    original = LanguageModel.forward

    def watched(self, *arguments, **options):
        if options.get("dropout") is not False:  # not an evaluation
            taken.append(options["steps"])
        return original(self, *arguments, **options)

    monkeypatch.setattr(LanguageModel, "forward", watched)
    cfg = debug("iterations=30", "random_steps=(2,5)", "save_every=10")
    loop.train(cfg, tmp_path / "a")
    assert set(taken) == {2, 3, 4, 5}
    loop.train(cfg, tmp_path / "b")
    assert taken[:30] == taken[30:]
    assert same(final_weights(tmp_path / "a"), final_weights(tmp_path / "b"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("random_steps=(0,3)",), r"random_steps = \(0, 3\)"),
        (("random_steps=(4,3)",), r"random_steps = \(4, 3\)"),
        (("random_steps=(1,2,3)",), "random_steps"),
        (("random_steps=(1,9)", "model.block=gpt"), "at most the blocks of this gpt"),
    ],
)
def test_wrong_numbers_of_steps(overrides, said):
    with pytest.raises(ValueError, match=said):
        debug(*overrides)
