"""The model family: against the plain reference, causality, and everyday use."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import nrgpt
from nrgpt import LanguageModel, ModelConfig
from nrgpt.model.init import initialise

from .. import reference
from ..models import (
    BLOCKS,
    COUPLINGS,
    DESCENDING,
    MASKS,
    NORMS,
    RATES,
    config,
    forces,
    randomised,
    relative,
)
from ..models import tokens as make_tokens
from ..models import weights as make_weights


@pytest.mark.parametrize("block", ["gpt", "rgpt", "rgpt_parallel"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("released", [False, True], ids=["matched", "released"])
def test_baselines_against_the_reference(block, norm, released):
    cfg = config(
        block=block,
        norm=norm,
        activation="relu" if released else "gelu",
        separate_norms=released,
        bias=released,
        tied=not released,
        head_bias=released,
        beta=0.4 if released else None,
    )
    model = randomised(cfg, std=0.1 if norm == "none" else 0.3)
    w = make_weights(model)
    idx, targets = make_tokens(cfg)
    logits, loss = model(idx, targets)
    expected = reference.loss(cfg, w, idx, targets)
    assert relative(logits, reference.logits(cfg, w, idx)) < 1e-10
    assert abs(loss.item() - expected.item()) < 1e-10
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, w[name].grad) < 1e-9, name


@pytest.mark.parametrize("fields", DESCENDING, ids=str)
def test_settled_and_safeguarded_models_against_the_reference(fields):
    cfg = config(**fields)
    model = randomised(cfg, std=0.1 if cfg.norm == "none" else 0.3)
    w = make_weights(model)
    idx, targets = make_tokens(cfg)
    for steps in (1, 3, 5):
        assert relative(model(idx, steps=steps)[0], reference.logits(cfg, w, idx, steps)) < 1e-10
    _, loss = model(idx, targets)
    loss.backward()
    reference.loss(cfg, w, idx, targets).backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        expected = w[name].grad
        if expected is None:  # the reference has no use for it, and so neither may the model
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        scale = max(expected.norm().item(), 1e-6)
        assert (parameter.grad - expected).norm() < 1e-8 * scale, name


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("rate", RATES)
def test_steps_at_call_time(rate, steps):
    """More steps than trained: per-step rates keep their last value."""
    model = randomised(config(rate=rate))
    idx, _ = make_tokens(model.cfg)
    expected = reference.logits(model.cfg, make_weights(model), idx, steps)
    assert relative(model(idx, steps=steps)[0], expected) < 1e-10
    assert len(list(model.states(idx, steps=steps))) == steps + 1


def test_gpt_cannot_take_more_steps_than_it_has_blocks():
    model = randomised(config(block="gpt"))
    idx, _ = make_tokens(model.cfg)
    assert model(idx, steps=2)[0].shape == (2, 7, 11)
    with pytest.raises(ValueError, match="steps = 4: must be at most 3"):
        model(idx, steps=4)
    with pytest.raises(ValueError, match="steps = 0"):
        model(idx, steps=0)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_nrgpt_is_causal(mask, coupling):
    """Changing token k leaves everything before k the same, bit for bit."""
    model = randomised(config(mask=mask, coupling=coupling))
    idx, _ = make_tokens(model.cfg, length=13)
    for k in (1, 6, 12):
        changed = idx.clone()
        changed[:, k] = (changed[:, k] + 1) % 11
        for before, after in zip(model.states(idx), model.states(changed), strict=True):
            pairs = [
                (model.energies(before), model.energies(after)),
                (forces(model, before), forces(model, after)),
            ]
            for first, second in pairs:
                for name in first:
                    assert torch.equal(first[name][:, :k], second[name][:, :k])
                    if name == "feedforward":
                        assert not torch.equal(first[name][:, k], second[name][:, k])
        assert torch.equal(model(idx)[0][:, :k], model(changed)[0][:, :k])


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_causal_and_every_sample_alone(block):
    model = randomised(config(block=block))
    idx, _ = make_tokens(model.cfg, batch=5, length=13)
    logits, _ = model(idx)
    changed = idx.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 11
    assert torch.equal(model(changed)[0][:, :6], logits[:, :6])
    assert relative(model(changed)[0][:, 6:], logits[:, 6:]) > 1e-3
    assert relative(model(idx[2:3])[0], logits[2:3]) < 1e-12
    assert relative(model(idx[:, :4])[0], logits[:, :4]) < 1e-12


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_first_token(coupling):
    """It sees nothing: no attention energy, no attention force, and no NaN in any gradient."""
    model = randomised(config(coupling=coupling))
    idx, targets = make_tokens(model.cfg, length=1)
    logits, loss = model(idx, targets)
    loss.backward()
    assert logits.shape == (2, 1, 11)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    x = model.embed(make_tokens(model.cfg)[0])
    assert (model.energies(x)["attention"][:, 0] == 0).all()
    assert (forces(model, x)["attention"][:, 0] == 0).all()
    assert (model.energies(x)["attention"][:, 1:] != 0).all()


def test_wrong_inputs():
    model = randomised(config())
    with pytest.raises(ValueError, match="14 tokens; this model takes 1 to context = 13"):
        model(torch.zeros(2, 14, dtype=torch.long))
    with pytest.raises(ValueError, match="0 tokens"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \(7,\); it must be \(batch, tokens\)"):
        model(torch.zeros(7, dtype=torch.long))
    for dtype in (torch.float32, torch.bool, torch.uint8):
        with pytest.raises(ValueError, match=f"{dtype}; it must be int64 or int32"):
            model(torch.zeros(2, 7, dtype=dtype))
    for steps in (0, -1, 2.0, "3", True):
        with pytest.raises(ValueError, match=r"steps = .*must be a whole number, at least 1"):
            model(torch.zeros(2, 7, dtype=torch.long), steps=steps)
    with pytest.raises(ValueError, match="token 11, and the vocabulary ends at 10"):
        model(torch.full((2, 7), 11))
    with pytest.raises(ValueError, match="token -1"):
        model(torch.full((2, 7), -1))
    with pytest.raises(ValueError, match=r"targets have shape \(2, 6\)"):
        model(torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long))
    with pytest.raises(ValueError, match="has no energy"):
        randomised(config(block="gpt")).energies(torch.zeros(1, 1, 9))
    with pytest.raises(ValueError, match="extra terms q: only block='nrgpt'"):
        randomised(config(block="gpt"))(torch.zeros(2, 7, dtype=torch.long), extra={"q": None})


def test_ignored_targets_do_not_count():
    model = randomised(config())
    idx, targets = make_tokens(model.cfg)
    some = targets.clone()
    some[:, :4] = -100
    logits, loss = model(idx, some)
    kept = torch.nn.functional.cross_entropy(logits[:, 4:].flatten(0, 1), targets[:, 4:].flatten())
    assert abs(loss.item() - kept.item()) < 1e-12


@pytest.mark.parametrize("block", BLOCKS)
def test_dropout_is_on_embeddings_and_updates_only(block):
    """With one step: x0 is the embedding with entries dropped, and so is each applied update."""
    cfg = config(block=block, dropout=0.5, steps=1)
    model = randomised(cfg).train()
    idx, _ = make_tokens(cfg, batch=50)
    clean = randomised(config(block=block, steps=1))
    clean.load_state_dict(model.state_dict())
    first, last = model.states(idx)
    assert 0.4 < (first == 0).double().mean() < 0.6
    kept = first != 0
    assert relative(first[kept], 2 * clean.embed(idx)[kept]) < 1e-12
    if block in ("nrgpt", "rgpt_parallel"):
        update = last - first
        whole = clean.blocks[0](first, 0, clean.blocks[0].plan()) - first
        kept = update.abs() > 1e-12
        assert 0.4 < kept.double().mean() < 0.6
        assert relative(update[kept], 2 * whole[kept]) < 1e-9


@pytest.mark.parametrize("block", BLOCKS)
def test_given_masks_are_the_ones_that_would_be_drawn(block):
    model = randomised(config(block=block, dropout=0.3)).train()
    idx, targets = make_tokens(model.cfg)
    torch.manual_seed(5)
    drawn, _ = model(idx, targets)
    torch.manual_seed(5)
    masks = model.draw_masks(*idx.shape)
    given, _ = model(idx, targets, masks=masks)
    assert torch.equal(drawn, given)
    other, _ = model(idx, targets)
    assert not torch.equal(other, given)
    for i in range(len(masks)):  # each of them has a say
        changed = masks.clone()
        changed[i] = 1 / 0.7 - changed[i]
        assert not torch.equal(model(idx, masks=changed)[0], given)


def test_dropout_is_off_in_evaluation():
    model = randomised(config(dropout=0.5)).eval()
    idx, _ = make_tokens(model.cfg)
    assert torch.equal(model(idx)[0], model(idx)[0])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_bfloat16_autocast(block, coupling):
    model = LanguageModel(
        config(block=block, coupling=coupling, bias=True, feedforward_scale=True, width=24)
    )
    idx, targets = make_tokens(model.cfg)
    _, exact = model(idx, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(idx, targets)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 0.02
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("feedforward", ["ff1", "ff2w", "ff2", "memory"])
def test_compile_captures_one_graph(rate, feedforward):
    model = randomised(config(rate=rate, feedforward=feedforward))
    check_compiled(model, backend="aot_eager")


@pytest.mark.parametrize("fields", DESCENDING[-6:], ids=str)
def test_compile_captures_one_graph_of_settled_models(fields):
    check_compiled(randomised(config(**fields)), backend="aot_eager")


@pytest.mark.parametrize("block", ["gpt", "rgpt", "rgpt_parallel"])
def test_compile_captures_one_graph_of_the_baselines(block):
    check_compiled(randomised(config(block=block)), backend="aot_eager")


def test_compile_with_inductor():
    # float32: inductor of torch 2.11 refuses the float64 log-sum-exp of a CPU's flash attention.
    model = randomised(config(mask="strict", feedforward="ff2w")).float()
    check_compiled(model, backend="inductor", tolerance=1e-5)


def test_compile_with_steps_and_extra_terms():
    model = randomised(config())
    idx, _ = make_tokens(model.cfg)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    term = Pull()
    for options in ({"steps": 5}, {"extra": {"pull": term}}):
        assert relative(compiled(idx, **options)[0], model(idx, **options)[0]) < 1e-9
    torch.compiler.reset()


class Pull(nrgpt.EnergyTerm):
    def energy(self, z, keys):
        return 0.1 * z.square().sum(-1)


def check_compiled(model, backend, tolerance=1e-9):
    idx, targets = make_tokens(model.cfg)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    gradients = []
    for forward in (model, compiled):
        model.zero_grad()
        _, loss = forward(idx, targets)
        loss.backward()
        learned = [p for p in model.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.flatten() for p in learned]))
    assert relative(gradients[1], gradients[0]) < tolerance
    torch.compiler.reset()


@pytest.mark.parametrize("block", BLOCKS)
def test_deepcopy_state_dict_and_other_processes(block):
    model = randomised(config(block=block, tied=False))
    idx, _ = make_tokens(model.cfg)
    expected = model(idx)[0]
    assert torch.equal(copy.deepcopy(model)(idx)[0], expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(idx)[0], expected)
    fresh = LanguageModel(model.cfg).double()
    assert not torch.equal(fresh(idx)[0], expected)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(idx)[0], expected)


def test_attention_may_begin_stronger():
    model = LanguageModel(config(alpha_init=4.0))
    assert (model.get_parameter("blocks.0.energy.terms.attention.alpha") == 4).all()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("norm", NORMS)
def test_initialisation_leaves_nothing_out(block, norm):
    for rate in RATES:
        model = LanguageModel(config(block=block, norm=norm, rate=rate, bias=True, tied=False))
        assert all(torch.isfinite(p).all() for p in model.parameters())
    model.register_parameter("stray", torch.nn.Parameter(torch.full((3,), float("inf"))))
    with pytest.raises(ValueError, match="'stray' starts with numbers that are not finite"):
        initialise(model, model.cfg)


@pytest.mark.parametrize("rate", RATES)
def test_every_rate_starts_at_the_asked_size(rate):
    for scale in (1.0,) if rate == "identity" else (0.1, 2.0, 300.0):
        model = LanguageModel(config(rate=rate, rate_scale=scale)).double()
        x = torch.randn(2, 7, 9, dtype=torch.float64)
        target = reference.projector(model.cfg, x) if rate == "state" else torch.eye(9)
        for term in ("attention", "feedforward"):
            eta = reference.eta(model.cfg, make_weights(model), 0, x, term)
            assert relative(eta, (scale * target).expand_as(eta).double()) < 1e-6


def test_a_root_of_low_rank_starts_at_the_asked_size_on_average():
    model = LanguageModel(config(width=30, rate="psd_skew", rate_rank=10, rate_scale=0.5)).double()
    (eta,) = model.energy_block.rate.matrices(model.energy_block.norm)
    eigenvalues = torch.linalg.eigvalsh(eta)
    assert (eigenvalues > 1e-6).sum() == 10
    assert eigenvalues.mean().item() == pytest.approx(0.5)


def test_models_of_shapes_alone():
    """On the meta device nothing is computed: large models can be counted."""
    for rate in RATES:
        with torch.device("meta"):
            assert LanguageModel(config(rate=rate)).parameter_counts().total > 0


def test_depth_scaled_start_without_a_norm(monkeypatch):
    """However many steps there are, x grows by about the same factor; unscaled, it explodes."""

    def growth(steps):
        cfg = ModelConfig(
            vocab_size=50, context=32, width=64, heads=4, steps=steps, norm="none", init_std=0.1
        )
        first, *_, last = LanguageModel(cfg).states(torch.randint(50, (4, 32)))
        return (last.norm() / first.norm()).item()

    assert max(growth(4), growth(64)) < 3
    monkeypatch.setattr(nrgpt.model.init, "depth_scale", lambda cfg: 1.0)
    assert not growth(64) < 1000


def test_import_is_light():
    code = (
        "import sys, nrgpt; heavy = {'matplotlib', 'transformers', 'pandas', 'tiktoken', 'rich', "
        "'scipy', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
