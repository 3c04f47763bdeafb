"""Wrong values are refused with the field, the value and the way out."""

import dataclasses

import numpy as np
import pytest

from nrgpt import ModelConfig


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"heads": 5, "width": 128}, r"heads = 5: must be a divisor of width = 128"),
        ({"steps": 0}, r"steps = 0: must be at least 1"),
        ({"vocab_size": -3}, r"vocab_size = -3: must be at least 1"),
        ({"dropout": 1.0}, r"dropout = 1\.0: must be in \[0, 1\)"),
        ({"dropout": float("nan")}, r"dropout = nan"),
        ({"beta": 0.0}, r"beta = 0\.0: must be positive"),
        ({"norm_eps": -1e-5}, r"norm_eps = -1e-05"),
        ({"init_std": float("inf")}, r"init_std = inf"),
        ({"width": 128.0}, r"width = 128\.0: must be of type int"),
        ({"width": True}, r"width = True: must be of type int"),
        ({"tied": 1}, r"tied = 1: must be of type bool"),
        ({"beta": "large"}, r"beta = 'large': must be of type float or None"),
        ({"block": "nrgtp"}, r"block = 'nrgtp': must be one of .*did you mean 'nrgpt'"),
        (
            {"feedforward": "ff2v"},
            r"feedforward = 'ff2v': no energy has that name; did you mean 'ff2'",
        ),
        ({"rate": "gama"}, r"rate = 'gama'.*did you mean 'gamma'"),
        ({"widht": 128}, r"ModelConfig has no field 'widht'; did you mean 'width'"),
        ({"feedforward": "FF2W"}, r"feedforward = 'FF2W': no energy has that name"),
        ({"rate": "identity", "rate_scale": 0.1}, r"rate_scale = 0\.1: must be left alone: rate ="),
        ({"learn_alpha": False, "alpha_init": 4.0}, r"alpha_init = 4\.0: must be left alone"),
        ({"alpha_init": 0.0}, r"alpha_init = 0\.0: must be positive"),
        ({"rate": "gamma", "rate_init": "random"}, r"rate_init = 'random': must be left alone"),
        ({"rate": "free", "rate_rank": 3}, r"rate_rank = 3: must be left alone"),
        ({"feedforward": "ff1", "potential": "gelu"}, r"potential = 'gelu': must be left alone"),
        (
            {"norm": "none", "norm_eps": 1e-3},
            r"norm_eps = 0\.001: must be left alone: norm = 'none'",
        ),
        ({"norm": "none", "learn_gamma": False}, r"learn_gamma = False: must be left alone"),
        ({"norm": "rmsnorm", "learn_delta": False}, r"learn_delta = False: must be left alone"),
        (
            {"feedforward": "memory", "activation": "relu"},
            r"activation = 'relu': must be",
        ),
        (
            {"terms": ("feedforward",), "mask": "inclusive"},
            r"mask = 'inclusive': must be",
        ),
        ({"terms": ("attention",), "bias": True}, r"bias = True: must be left alone: terms ="),
        (
            {"terms": ("attention",), "feedforward": "ff1"},
            r"feedforward = 'ff1': must be",
        ),
        (
            {"terms": ("attention", "ff3")},
            r"terms = 'ff3': no energy has that name.*--plugin",
        ),
        ({"terms": ()}, r"terms = \(\): must be at least one energy"),
        ({"terms": ("ff1", "ff1")}, r"terms = \('ff1', 'ff1'\): must be different"),
        ({"separate_norms": True}, r"separate_norms = True: must be left alone: block = 'nrgpt'"),
        ({"colour": "red"}, r"no field 'colour'; known are .*width"),
    ],
)
def test_wrong_values(fields, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(**fields)


def test_whole_numbers_may_stand_for_floats_and_replace_checks_too():
    cfg = ModelConfig(dropout=0, beta=1)
    assert dataclasses.replace(cfg, width=12, heads=4).head_width == 3
    with pytest.raises(ValueError, match="heads = 5"):
        dataclasses.replace(cfg, heads=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.width = 3
    assert ModelConfig(**dataclasses.asdict(cfg)) == cfg


def test_numbers_of_numpy_become_python_numbers():
    cfg = ModelConfig(width=np.int64(64), heads=np.int32(4), dropout=np.float32(0.5))
    assert type(cfg.width) is type(cfg.heads) is int
    assert type(cfg.dropout) is float
    with pytest.raises(ValueError, match="width"):
        ModelConfig(width=np.float64(64))


def test_other_blocks_leave_what_they_do_not_read():
    """A comparison may change ``block`` and nothing else."""
    fields = {"feedforward": "memory", "potential": "softplus", "rate": "gamma", "rate_scale": 0.5}
    assert ModelConfig(block="gpt", **fields) != ModelConfig(block="nrgpt", **fields)
    with pytest.raises(ValueError, match="potential = 'softplus': must be left alone"):
        ModelConfig(block="nrgpt", **{**fields, "feedforward": "ff1"})


def test_full_coupling_does_not_split_the_width():
    assert ModelConfig(width=380, heads=8, coupling="full").score_scale == (380 / 8) ** -0.5
    with pytest.raises(ValueError, match="heads = 8"):
        ModelConfig(width=380, heads=8, coupling="full", block="gpt")
