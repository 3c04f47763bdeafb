"""Configurations refuse what would do nothing."""

import pytest

from nrgpt.train.config import OptimiserConfig


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        ({"muon_lr": 0.1}, r"muon_lr = 0\.1: must be 0\.02 with name = 'adamw'"),
        ({"muon_eta": True}, "muon_eta = True: must be False with name = 'adamw'"),
        (
            {"decay": "constant", "final": 0.5},
            r"final = 0\.5: must be 0\.1 with decay = 'constant'",
        ),
    ],
    ids=str,
)
def test_options_that_would_do_nothing_are_refused(idle, said):
    with pytest.raises(ValueError, match=said):
        OptimiserConfig(**idle)
    OptimiserConfig(**{**idle, "name": "muon", "decay": "cosine"})
