"""Presets, by name."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from nrgpt.data.shards import write_dataset
from nrgpt.data.tokenizer import GPT2Tokenizer, SymbolTokenizer
from nrgpt.train import loop, presets
from nrgpt.train.distributed import World
from nrgpt.train.overrides import replace
from nrgpt.train.updates import Plain, Recorded, choose_update


def test_every_preset_is_found_by_searching_for_its_name():
    source = Path(presets.__file__).read_text()
    assert len(presets.PRESETS) == 71
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


def tiny(cfg, folder):
    """The same kind of model and data, with as many tokens in its vocabulary beyond the data's."""
    sizes = {
        "iterations": 2, "batch": 2, "accumulation": 1, "eval_batches": 1, "save_every": 2,
        "eval_every": 2, "log_every": 1, "compile": False, "optimiser.warmup": 0, "device": "cpu",
        "model.width": 12, "model.heads": min(cfg.model.heads, 2), "model.context": 64,
    }  # fmt: skip
    if cfg.first_exit > 2:
        sizes |= {"first_exit": 2}
    if cfg.model.steps > 3:
        sizes |= {"model.steps": 3}
    if cfg.data.task == "listops":
        few = {"train": 60, "validation": 40, "test": 4}
        sizes |= {f"data.listops.{name}": number for name, number in few.items()}
        return replace(cfg, sizes)
    letters = SymbolTokenizer([chr(97 + i) for i in range(20)])
    tokens = np.random.default_rng(0).integers(0, 20, 400)
    spare = cfg.model.vocab_size - {"text": GPT2Tokenizer.vocab_size}.get(cfg.data.task, 65)
    if not (folder / "manifest.json").exists():
        splits = {"train": [tokens], "val": [tokens[:150]]}
        write_dataset(folder, letters, splits, source={"kind": cfg.data.task})
    return replace(cfg, sizes | {"model.vocab_size": 20 + spare, "data.folder": str(folder)})


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_can_be_trained_to_its_end(name, tmp_path):
    cfg = presets.PRESETS[name]()
    small = tiny(cfg, tmp_path / cfg.data.task)
    assert small.model.block == cfg.model.block
    result = loop.train(dataclasses.replace(small), tmp_path / "run")
    assert result["step"] == 2
    assert (tmp_path / "run" / "samples.txt").stat().st_size > 0
