"""NRGPTConfig: nrgpt's ModelConfig as Hugging Face's tools expect it."""

import dataclasses
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from ..check import suggestion
from ..model.config import ModelConfig

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
THEIRS = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {
    *("attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path"),
    *("num_labels", "output_attentions", "quantization_config", "tokenizer_class", "torch_dtype"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
}
"""What transformers itself writes into a config.json, besides generation parameters."""


class NRGPTConfig(PreTrainedConfig):
    """The fields of ModelConfig, under their own names and under transformers' usual names."""

    model_type = "nrgpt"
    attribute_map = {  # noqa: RUF012 (transformers' own convention)
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "num_hidden_layers": "steps",
        "max_position_embeddings": "context",
        "tie_word_embeddings": "tied",
    }
    keys_to_ignore_at_inference = ["past_key_values", "energies"]  # noqa: RUF012 (the same)

    def __init__(self, **values: Any):
        ours = {name: values.pop(name) for name in FIELDS if name in values}
        for usual, name in self.attribute_map.items():
            if usual in values:
                value = values.pop(usual)
                if ours.setdefault(name, value) != value:
                    raise ValueError(
                        f"{usual} = {value!r} and {name} = {ours[name]!r}: these are the same field"
                    )
        self.num_steps = values.pop("num_steps", None)  # of inference; None: as trained
        known = {*FIELDS, *self.attribute_map, "num_steps"}
        theirs = THEIRS | GenerationConfig().to_dict().keys()
        for name in values:
            if name not in theirs and not name.startswith("_"):
                raise ValueError(f"NRGPTConfig has no field {name!r}{suggestion(name, known)}")
        model = ModelConfig(**ours)  # checks the values
        for name in FIELDS:
            setattr(self, name, getattr(model, name))
        super().__init__(**values)

    def model_config(self) -> ModelConfig:
        """The ModelConfig, checked."""
        return ModelConfig(**{name: getattr(self, name) for name in FIELDS})

    @classmethod
    def from_model_config(cls, cfg: ModelConfig, **theirs: Any) -> "NRGPTConfig":
        return cls(**dataclasses.asdict(cfg), **theirs)
