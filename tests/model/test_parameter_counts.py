"""The paper's parameter counts, to the unit where a unit is known."""

import pytest
import torch

from nrgpt import LanguageModel
from nrgpt.interop.released import released_config

from ..models import BLOCKS, RATES, config

OWT = {"vocab_size": 50_304, "context": 1_024}
SHAKESPEARE = {"vocab_size": 65, "context": 256}


def counts(kind, sizes):
    with torch.device("meta"):
        return LanguageModel(released_config(kind, **sizes)).parameter_counts()


@pytest.mark.parametrize(
    ("kind", "sizes", "untied", "tied"),
    [
        ("NRGPT_H_FF2W", {**OWT, "width": 768, "heads": 12, "steps": 12}, 90_496_129, 51_862_657),
        ("GPT_Rec_parallel", {**OWT, "width": 768, "heads": 12, "steps": 12}, 85_190_784, None),
        ("GPT_Rec_parallel", {**OWT, "width": 1740, "heads": 12, "steps": 6}, None, 125_713_104),
        ("NRGPT_H_FF2W", {**OWT, "width": 1536, "heads": 12, "steps": 6}, None, 128_447_617),
    ],
)
def test_to_the_unit(kind, sizes, untied, tied):
    c = counts(kind, sizes)
    assert c.untied - c.tied == 50_304 * sizes["width"]
    assert untied is None or c.untied == untied
    assert tied is None or c.tied == tied


@pytest.mark.parametrize(
    ("kind", "sizes", "untied", "tied"),
    [
        ("NRGPT_H_FF2W", {**OWT, "width": 768, "heads": 12, "steps": 12}, 90.50, 51.86),
        ("GPT_Rec_parallel", {**OWT, "width": 768, "heads": 12, "steps": 12}, 85.19, 46.56),
        ("GPT", {**OWT, "width": 768, "heads": 12, "steps": 12}, 163.13, 124.50),
        ("GPT_Rec_parallel", {**OWT, "width": 1740, "heads": 12, "steps": 6}, 213.24, 125.71),
        ("NRGPT_H_FF2W", {**OWT, "width": 1536, "heads": 12, "steps": 6}, 205.71, 128.45),
    ],
)
def test_openwebtext_in_millions(kind, sizes, untied, tied):
    c = counts(kind, sizes)
    assert (round(c.untied / 1e6, 2), round(c.tied / 1e6, 2)) == (untied, tied)


@pytest.mark.parametrize(
    ("kind", "sizes", "thousands"),
    [
        ("GPT", {"width": 64, "heads": 4, "steps": 8}, 423),
        ("GPT_Rec_parallel", {"width": 128, "heads": 1, "steps": 8}, 248),
        ("NRGPT_H_FF1", {"width": 512, "heads": 2, "steps": 6}, 2036),
        ("NRGPT_H_FF2W", {"width": 128, "heads": 1, "steps": 8}, 214),
    ],
)
def test_shakespeare(kind, sizes, thousands):
    assert round(counts(kind, {**SHAKESPEARE, **sizes}).untied / 1e3) == thousands


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_groups_sum_to_the_total(block, tied):
    for rate in RATES:
        model = LanguageModel(config(block=block, rate=rate, tied=tied, head_bias=True, bias=True))
        c = model.parameter_counts()
        assert sum(c.groups.values()) == c.total == sum(p.numel() for p in model.parameters())
        assert c.total == (c.tied if tied else c.untied)
        assert ("rate" in c.groups) == (block == "nrgpt" and rate != "identity")


def test_frozen_parameters_are_not_counted():
    free = LanguageModel(config()).parameter_counts()
    fixed = LanguageModel(config(learn_gamma=False, learn_delta=False)).parameter_counts()
    assert free.total - fixed.total == 2 * 9
    assert "norm" not in fixed.groups
