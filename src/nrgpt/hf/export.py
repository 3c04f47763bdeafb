"""A run as a folder that Hugging Face's tools can load, with or without nrgpt installed."""

import glob
import os
import shutil
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from ..files import unfinished_of_dead
from ..interop.checksums import write_checksums
from ..language_model import LanguageModel
from ..train.runs import Run, load_run
from .card import write_card
from .configuration import NRGPTConfig
from .modeling import NRGPTForCausalLM
from .tokenizer import END, fast_tokenizer


def export_run(
    run: Path | Run, to: Path, *, step: int | None = None, name: str | None = None
) -> Path:
    """Write config, weights, tokenizer, generation config, model card and code into ``to``, which
    must not exist or be empty. It only appears once complete. ``name`` is the card's title."""
    to = Path(to)
    if to.resolve() == Path.cwd():
        raise ValueError(f"{to} is the present folder; name a new one")
    to = to.absolute()
    is_empty = to.is_dir() and not any(to.iterdir())
    if os.path.lexists(to) and not is_empty:
        raise FileExistsError(f"{to} exists and is not an empty folder; choose another")
    loaded = run if isinstance(run, Run) else load_run(Path(run), step)
    wrapper = wrapped(loaded.model)
    tokenizer = fast_tokenizer(
        loaded.tokenizer, loaded.cfg.model.context, lisp=loaded.cfg.data.listops.notation == "lisp"
    )
    wrapper.generation_config = generation_config(tokenizer)
    unfinished = to.with_name(f".{to.name}.{os.getpid()}")
    if to.parent.is_dir():
        for left in unfinished_of_dead(to.parent, glob.escape(to.name)):
            shutil.rmtree(left, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        wrapper.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        write_card(loaded, unfinished, name or to.name)
        # safetensors makes its files readable by their owner only.
        mode = (unfinished / "config.json").stat().st_mode
        for weights in unfinished.glob("*.safetensors"):
            weights.chmod(mode)
        write_checksums(unfinished)
        if is_empty:
            to.rmdir()
        unfinished.replace(to)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return to


def wrapped(model: LanguageModel) -> NRGPTForCausalLM:
    """The model in transformers' interface, sharing its weights."""
    model.check_continues("nrgpt export")
    wrapper = NRGPTForCausalLM(NRGPTConfig.from_model_config(model.cfg))
    wrapper.language_model = model
    return wrapper.train(model.training)


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """How a text starts if the prompt is empty, how it ends, and whether to sample."""
    end = tokenizer.eos_token_id
    if end is None:  # characters
        return GenerationConfig(bos_token_id=tokenizer.get_vocab().get("\n", 0))
    # ListOps has one right answer, but transformers' pipeline samples by default.
    greedy = {"do_sample": False} if tokenizer.eos_token == END else {}
    return GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end, **greedy)
