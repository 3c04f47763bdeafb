"""`import nrgpt` registers the Auto classes, in any order of imports, and stays light."""

import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

import nrgpt.hf

USE = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
config = AutoConfig.for_model("nrgpt", vocab_size=5, context=4, width=4, heads=2, steps=2)
for auto, name in ((AutoModel, "NRGPTModel"), (AutoModelForCausalLM, "NRGPTForCausalLM")):
    model = auto.from_config(config)
    assert type(model).__name__ == name and type(model).__module__ == "nrgpt.hf.modeling"
"""
ORDERS = {
    "nrgpt first": "import sys, nrgpt; assert 'transformers' not in sys.modules" + USE,
    "all of it first": "from transformers import AutoModelForCausalLM; import nrgpt" + USE,
    "generation first": "import nrgpt; from transformers.generation.utils import GenerationMixin"
    + USE,
}


@pytest.mark.parametrize("code", ORDERS.values(), ids=ORDERS)
def test_whatever_comes_first(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_is_named(monkeypatch):
    for module in ("nrgpt.hf.configuration", "nrgpt.hf.modeling", "nrgpt.hf.past"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"NRGPTConfig needs transformers.*pip install 'nrgpt\[hf\]'"
    ):
        nrgpt.hf.NRGPTConfig  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'NRGPTConfg'"):
        nrgpt.hf.NRGPTConfg  # noqa: B018


def test_everything_offered_is_there():
    assert sorted(nrgpt.hf.WHERE) == nrgpt.hf.__all__
    assert all(callable(getattr(nrgpt.hf, name)) for name in nrgpt.hf.__all__)
    assert AutoModelForCausalLM._model_mapping[nrgpt.hf.NRGPTConfig] is nrgpt.hf.NRGPTForCausalLM
