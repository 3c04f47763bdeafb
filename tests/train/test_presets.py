"""Presets, by name."""

from pathlib import Path

import torch

from nrgpt.train import presets
from nrgpt.train.distributed import World
from nrgpt.train.updates import Plain, Recorded, choose_update


def test_every_preset_is_found_by_searching_for_its_name():
    source = Path(presets.__file__).read_text()
    assert len(presets.PRESETS) == 61
    for name, make in presets.PRESETS.items():
        assert f'"{name}": (' in source
        assert make.__doc__
        assert make() == make()


def test_every_preset_can_be_trained_on_a_gpu():
    """None asks for what cannot be combined."""
    gpu = World(0, 1, torch.device("cuda"))
    for name, make in presets.PRESETS.items():
        expected = Recorded if make().graph else Plain
        assert choose_update([make()], gpu) is expected, name
    assert not presets.PRESETS["energy_100_steps_paper"]().graph
