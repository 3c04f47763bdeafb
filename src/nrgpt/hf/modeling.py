"""NRGPTModel and NRGPTForCausalLM: nrgpt's model behind transformers' interface.

All computation is done by nrgpt. Padding is moved out of the way before the model sees a text.
"""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from ..check import suggestion
from ..dynamics.attention import attention_weights
from ..interop.checksums import forget_checksums
from ..interop.weights import align_memory, load_safetensors
from ..kernels.loss import IGNORED_TARGET, plain_loss
from ..model.network import Network
from .adapters import with_adapters
from .configuration import NRGPTConfig
from .padding import Aligned, align
from .past import NRGPTCache


@dataclass
class NRGPTOutput(ModelOutput):
    """``energies`` of the final state, by name, each (batch, tokens), with 0 for padding.
    ``hidden_states`` are x before the first step and after each step. ``last_hidden_state`` is the
    last of them after the final norm, which the head reads. ``attentions`` are how much each token
    looks at each other one, a tensor (batch, heads, tokens, tokens) for every step."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: NRGPTCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    energies: dict[str, Tensor] | None = None


class NRGPTPreTrainedModel(PreTrainedModel):
    config_class = NRGPTConfig
    base_model_prefix = "language_model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EnergyBlock", "SequentialBlock", "ParallelBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: NRGPTConfig):
        super().__init__(config)
        self.language_model = Network(config.model_config())
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The model has initialised itself."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, name: Any, *arguments: Any, **options: Any
    ) -> Any:
        """As usual, but refuses pickle files and weights that do not fit the config."""
        if options.get("use_safetensors") is False:
            raise ValueError("use_safetensors = False: pickle files are never opened")
        refuse_quantisation(options)
        wants_report = options.pop("output_loading_info", False)
        model, report = load_safetensors(super().from_pretrained, name, *arguments, **options)
        align_memory(model)
        return (model, report) if wants_report else model

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike, **options: Any
    ) -> None:
        """Also writes the code that ``trust_remote_code`` needs. (If the model was itself loaded
        from such code, transformers copies the files.)"""
        if any(".parametrizations." in name for name, _ in self.named_parameters()):
            raise ValueError(
                "quantised weights, and those of as_linear, are for memory only: save the model "
                "before, or after as_parameters, and quantise it again when it is loaded"
            )
        if options.get("is_main_process", True):
            forget_checksums(Path(save_directory))
        super().save_pretrained(save_directory, **options)
        if __name__.startswith("nrgpt.") and options.get("is_main_process", True):
            importlib.import_module("nrgpt.hf.code").write_code(Path(save_directory))

    def _set_gradient_checkpointing(  # type: ignore[override]
        self, enable: bool = True, **_: Any
    ) -> None:
        self.gradient_checkpointing = self.language_model.checkpoint_steps = enable

    def enable_input_require_grads(self) -> None:
        """Not needed: our gradient checkpointing is not re-entrant."""

    def disable_input_require_grads(self) -> None:
        """See above."""

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding as a module, for tools that look at its weight."""
        return nn.Embedding.from_pretrained(self.language_model.tokens.detach())

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise ValueError(
            "the vocabulary of an NRGPT is fixed: create a model with another vocab_size"
        )

    def get_output_embeddings(self) -> None:
        return None

    def run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: NRGPTCache | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        output_energies: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Aligned, NRGPTOutput]:
        """The final state x, how its tokens were aligned, and an output without logits."""
        check_others(others)
        model, past = self.language_model, past_key_values
        num_steps = self.config.num_steps if num_steps is None else num_steps
        if input_ids is None or input_ids.dim() != 2 or 0 in input_ids.shape:
            shape = None if input_ids is None else tuple(input_ids.shape)
            raise ValueError(f"input_ids has shape {shape}; it must be (batch, tokens), not empty")
        if past is None and use_cache:
            past = NRGPTCache(model.cfg.context)
        rows, columns = input_ids.shape
        wanted = (rows, columns + (0 if past is None else past.columns))
        if attention_mask is not None and attention_mask.shape != wanted:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it must have {wanted}: "
                "0 for padding, 1 for text, including the tokens in the cache"
            )
        aligned = align(input_ids, attention_mask)
        if past is not None or not torch.compiler.is_compiling():  # a graph is for any batch
            self.check_lengths(aligned, past)
        wants_states = output_hidden_states
        if wants_states is None:
            wants_states = self.config.output_hidden_states
        if past is not None:
            if wants_states or output_energies or output_attentions:
                raise ValueError(
                    "output_energies, output_hidden_states and output_attentions need the whole "
                    "text: use_cache=False"
                )
            return self.extend(aligned, past, num_steps), aligned, NRGPTOutput(past_key_values=past)
        states: list[Tensor] = []
        start = None
        for x in model.states(aligned.idx, steps=num_steps):
            start = x if start is None else start
            states = [*states, x] if wants_states else [x]
        output = NRGPTOutput()
        if wants_states:
            output.hidden_states = tuple(map(aligned.back, states))
        if output_energies:
            energies = model.energies(x, start=start)
            output.energies = {name: aligned.back(e) for name, e in energies.items()}
        if output_attentions:
            weights = attention_weights(model, aligned.idx, steps=num_steps)
            output.attentions = tuple(map(aligned.back_both_ways, weights))
        return x, aligned, output

    def check_lengths(self, aligned: Aligned, past: NRGPTCache | None) -> None:
        """Every text needs a token, and no prompt may be longer than the context."""
        counts = aligned.counts()
        before = past.keys.lengths if past is not None and past.columns else None
        if before is not None and len(before) != len(counts):
            raise ValueError(f"input_ids has {len(counts)} rows; the cache {len(before)}")
        lengths = [sum(both) for both in zip(counts, before, strict=True)] if before else counts
        if 0 in lengths:
            raise ValueError(
                f"row {lengths.index(0)} of input_ids is all padding: every text must have at "
                "least one token"
            )
        context = self.language_model.cfg.context
        if before is None and max(lengths) > context:
            raise ValueError(
                f"a text of {max(lengths)} tokens is longer than this model's context of {context}"
            )

    def extend(self, aligned: Aligned, past: NRGPTCache, num_steps: int | None) -> Tensor:
        """The final states of the tokens that follow those in the cache."""
        model = self.language_model
        steps = model.check_steps(num_steps)
        if past.columns and past.steps != steps:
            raise ValueError(f"num_steps = {steps}: the cache was filled with {past.steps} steps")
        past.steps = steps
        plans = past.plans
        if plans is None or torch.is_grad_enabled():  # with gradients, weights may change
            plans = model.plan(stacked=not torch.is_grad_enabled())
            past.plans = None if torch.is_grad_enabled() else plans
        idx, counts = aligned.idx, aligned.counts()
        new_counts = counts
        new = [row[:count] for row, count in zip(idx.tolist(), counts, strict=True)]
        is_cut = past.append(new, (idx if aligned.real is None else aligned.real).shape[1])
        if is_cut:  # compute all keys again
            past.forget_keys()
            counts = [len(text) for text in past.texts]
            idx = pad_sequence([torch.tensor(text) for text in past.texts], batch_first=True)
            idx = idx.to(self.device)
        model.check_tokens(idx)
        positions = past.keys.begin(len(idx), idx.shape[1], idx.device)
        x = model.extend(idx, positions, plans, past.keys, steps=steps)
        past.keys.end(counts)
        if not is_cut:
            return x
        first = torch.tensor(counts) - torch.tensor(new_counts)
        places = first[:, None] + torch.arange(aligned.idx.shape[1])
        places = places.clamp(max=x.shape[1] - 1).to(self.device)
        return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))


class NRGPTModel(NRGPTPreTrainedModel):
    """Without a head: ``last_hidden_state`` is what the head would read."""

    @with_adapters
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **options: Any,
    ) -> NRGPTOutput | tuple[Any, ...]:
        """Further options: past_key_values, use_cache, num_steps, output_energies and
        output_hidden_states, as in NRGPTForCausalLM."""
        x, aligned, output = self.run(input_ids, attention_mask, **options)
        output.last_hidden_state = aligned.back(self.language_model.final_norm(x))
        return output.to_tuple() if return_dict is False else output


class NRGPTForCausalLM(NRGPTPreTrainedModel, GenerationMixin):
    """The language model. It shifts ``labels`` itself, so pass labels = input_ids."""

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Use our cache in generate: transformers' own cannot hold keys for each step."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation = {generation_config.cache_implementation!r}: an NRGPT has "
                "a cache of its own; leave this at None"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = NRGPTCache(self.language_model.cfg.context)

    @with_adapters
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: NRGPTCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        output_energies: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> NRGPTOutput | tuple[Any, ...]:
        """``num_steps`` is the number of inference steps, by default as in training.
        ``logits_to_keep`` selects the last tokens (0: all) or a tensor of positions; with
        ``labels``, all logits are computed."""
        x, aligned, output = self.run(
            input_ids,
            attention_mask,
            past_key_values,
            use_cache,
            num_steps,
            output_energies,
            output_hidden_states,
            output_attentions,
            **others,
        )
        # Padding on the right goes on from the last token before it: generate looks there.
        x = aligned.back(x, goes_on=True)
        if labels is None and isinstance(logits_to_keep, Tensor):
            x = x[:, logits_to_keep]
        elif labels is None and logits_to_keep:
            x = x[:, -logits_to_keep:]
        output.logits = self.language_model.readout(x)
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED_TARGET)
            if aligned.real is not None:  # padding does not predict the first token of a text
                targets = targets.masked_fill(~aligned.real, IGNORED_TARGET)
            if num_items_in_batch is None:
                output.loss = plain_loss(output.logits, targets)
            else:  # Trainer adds up several batches, some of which may have nothing to predict
                total = plain_loss(output.logits, targets, reduction="sum")
                output.loss = total / num_items_in_batch
        return output.to_tuple() if return_dict is False else output


def refuse_quantisation(options: dict[str, Any]) -> None:
    """transformers' own would look for nn.Linear, find none, and do nothing without a word."""
    for name in ("quantization_config", "load_in_8bit", "load_in_4bit"):
        if options.get(name):
            raise ValueError(
                f"{name}: an NRGPT has no nn.Linear, so this would change nothing; load it as it "
                "is, and then nrgpt.hf.quantise(model, 'int8')"
            )


def check_others(others: dict[str, Any]) -> None:
    """Arguments that would have no effect are errors, unless they are None or False."""
    known = ("input_ids", "attention_mask", "labels", "num_steps", "output_energies", "use_cache")
    for name, value in others.items():
        if value is None or value is False:
            continue
        if name == "position_ids":
            raise ValueError(
                "position_ids: not supported; positions count from the first token of each text"
            )
        raise ValueError(f"forward() has no argument {name!r}{suggestion(name, known)}")
