"""Fields given on the command line."""

import pytest

from nrgpt.train.overrides import parse
from tests.runs import debug


def test_none_is_a_word_where_the_field_has_it_and_nothing_elsewhere():
    assert debug("model.norm=none").model.norm == "none"
    assert debug("optimiser.clip=none").optimiser.clip is None
    assert debug("random_steps=None").random_steps is None
    with pytest.raises(ValueError, match="decay = None: must be one of"):
        debug("optimiser.decay=none")


def test_values_are_read_as_python_writes_them():
    cfg = debug("--model.width=32", "optimiser.lr=1e-2", "random_steps=(1,2)", "compile=true")
    assert (cfg.model.width, cfg.optimiser.lr) == (32, 0.01)
    assert (cfg.random_steps, cfg.compile) == ((1, 2), True)
    assert parse("{[]: 1}") == "{[]: 1}"


def test_what_is_no_assignment_or_no_field_is_refused():
    with pytest.raises(ValueError, match="write name=value"):
        debug("model.width")
    with pytest.raises(ValueError, match=r"no field 'model\.wdth'; did you mean 'model\.width'"):
        debug("model.wdth=3")
