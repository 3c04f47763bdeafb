"""The neighbours are trained, resumed, evaluated and refused like everybody else."""

import pytest
import torch

import nrgpt
from nrgpt.data.masking import Masking
from nrgpt.explore.models import about
from nrgpt.measure.loss import masked_loss, split_loss
from nrgpt.train import loop
from nrgpt.train.config import TrainConfig
from nrgpt.train.faults import TrainingError
from nrgpt.train.runs import load_run, read_result
from tests.runs import debug, final_weights, losses, run_cli, same, stop_at

TOKENS = debug().model.vocab_size
ET = (
    "model.block=et", "model.feedforward=memory", "model.rate=scalar", "model.learn_gamma=false",
    "objective=masked", f"model.vocab_size={TOKENS + 1}",
)  # fmt: skip
EBT = ("model.block=ebt", "model.layers=1", "model.steps=2", "model.dropout=0")
SHORT = ("iterations=6", "optimiser.warmup=1", "eval_every=3", "log_every=1", "save_every=100")
NEIGHBOURS = {
    "et": ET,
    "et cone": (*ET, "model.safeguard=cone", "optimiser.name=muon"),
    "ebt": EBT,
    "ebt muon": (*EBT, "optimiser.name=muon", "accumulation=2"),
    "masked gpt": ("model.block=gpt", *ET[-2:]),
    "identity": ("model.block=rgpt", "model.values=identity"),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_split_anywhere_equals_uninterrupted(tmp_path, name, monkeypatch):
    cfg = debug(*NEIGHBOURS[name], *SHORT, "final_evaluation=false")
    loop.train(cfg, tmp_path / "whole")
    stop_at(monkeypatch, 2)
    with pytest.raises(TrainingError, match="saved at iteration 2"):
        loop.train(cfg, tmp_path / "split")
    monkeypatch.undo()
    loop.train(cfg, tmp_path / "split")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "split"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "split")


@pytest.mark.parametrize("name", ["et", "ebt"])
def test_a_whole_run_and_what_it_leaves(tmp_path, name):
    loop.train(debug(*NEIGHBOURS[name], *SHORT), tmp_path)
    loaded = load_run(tmp_path)
    stream, result = loaded.dataset().tokens("val"), read_result(tmp_path)
    if name == "et":
        found = masked_loss(loaded.model, stream, Masking(0.15, TOKENS))
        assert "_" in (tmp_path / "samples.txt").read_text()
        said = run_cli("evaluate", str(tmp_path)).stdout
        assert f"of {found.tokens:,} missing tokens" in said
        with pytest.raises(ValueError, match="block = 'et': it predicts missing tokens"):
            split_loss(loaded.model, stream)
    else:
        found = split_loss(loaded.model, stream)
        assert "listops" in result
        assert nrgpt.load(tmp_path).generate("sum(1,2) =", max_new_tokens=3) is not None
    assert result["val_loss_full"] == pytest.approx(found.loss, rel=1e-6)
    seen = nrgpt.load(tmp_path).trajectory("sum(1,2) = 3")
    assert torch.isfinite(seen.energies["total"]).all()


def test_the_loss_of_missing_tokens_is_counted_once_each():
    cfg = nrgpt.ModelConfig(vocab_size=8, context=5, width=8, heads=2, steps=1, block="et")
    model = nrgpt.LanguageModel(cfg)
    stream = nrgpt.data.shards.TokenStream("val", [torch.randint(7, (33,)).numpy()])
    whole = masked_loss(model, stream, Masking(0.4, 7), size=32)
    assert whole.loss == pytest.approx(torch.log(torch.tensor(8.0)).item(), abs=0.5)
    assert 6 <= whole.tokens <= 30  # of six windows
    assert masked_loss(model, stream, Masking(0.4, 7), size=32) == whole


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.block=et",), "objective = 'next': must be 'masked' with model.block = 'et'"),
        (("masked_share=0.3",), r"masked_share = 0\.3: must be left alone with objective"),
        (("objective=masked", "masked_share=1"), r"masked_share = 1: must be in \(0, 1\)"),
        ((*EBT, "compile=true"), "compile = True: must be False with model.block = 'ebt'"),
        ((*EBT, "early_exits=0.1"), r"early_exits = 0\.1: must be 0\.0 with model.block = 'ebt'"),
        ((*EBT, "checkpoint_steps=true"), "checkpoint_steps = True: must be False with"),
    ],
)
def test_refused_configurations(overrides, said):
    with pytest.raises(ValueError, match=said):
        debug(*overrides)


def test_room_for_the_missing_token(tmp_path):
    with pytest.raises(ValueError, match=f"one stands for .* add model.vocab_size={TOKENS + 1}"):
        loop.train(debug("objective=masked"), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("name", ["et", "ebt"])
def test_not_packed(tmp_path, name):
    cfgs = [debug(*NEIGHBOURS[name], f"seed={seed}") for seed in (0, 1)]
    with pytest.raises(ValueError, match=r"cannot be combined with packed runs"):
        loop.train_packed(cfgs, [tmp_path / "0", tmp_path / "1"])


@pytest.mark.parametrize("block", ["et", "ebt"])
def test_doors_that_are_closed(block):
    model = nrgpt.LanguageModel(nrgpt.ModelConfig(vocab_size=9, width=8, heads=2, block=block))
    for what in ("nrgpt serve", "nrgpt explore"):
        with pytest.raises(ValueError, match=f"{what}: a model with block = '{block}'"):
            model.check_continues(what)
    with pytest.raises(ValueError, match="nrgpt explore: a model with block"):
        about(model, None, "name")
    with pytest.raises(ValueError, match="without attention"):
        model.attention(torch.zeros(1, 3, dtype=torch.long))


def test_missing_tokens_by_default():
    cfg = TrainConfig()
    assert cfg.masking is None
    assert cfg.more_tokens == 0
