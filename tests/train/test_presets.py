"""Presets, by name."""

import torch

from nrgpt.train import presets
from nrgpt.train.distributed import World
from nrgpt.train.updates import Plain, Recorded, choose_update


def test_every_preset_is_explained_and_always_the_same():
    assert len(presets.PRESETS) == 61
    for make in presets.PRESETS.values():
        assert make.__doc__
        assert make() == make()


def test_every_preset_can_be_trained_on_a_gpu():
    """None asks for what cannot be combined."""
    gpu = World(0, 1, torch.device("cuda"))
    for name, make in presets.PRESETS.items():
        expected = Recorded if make().graph else Plain
        assert choose_update([make()], gpu) is expected, name
    assert not presets.PRESETS["energy_100_steps_paper"]().graph
