"""A run as a folder that Hugging Face's tools understand, with or without nrgpt installed."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..data.tokenizer import GPT2Tokenizer, SymbolTokenizer, Tokenizer
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
    must not exist or be empty. It appears when it is complete. ``name`` is the card's title."""
    to = Path(to)
    refuse_filled(to)
    loaded = run if isinstance(run, Run) else load_run(Path(run), step)
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        wrapped(loaded.model, loaded.tokenizer).save_pretrained(unfinished)
        fast_tokenizer(loaded.tokenizer, loaded.cfg.model.context).save_pretrained(unfinished)
        write_card(loaded, unfinished, name or to.name)
        # The temporary folder, and what safetensors writes, are for their maker alone.
        unfinished.chmod(0o777 & ~current_umask())
        for file in unfinished.iterdir():
            file.chmod(0o666 & ~current_umask())
        if to.exists():
            to.rmdir()  # empty
        unfinished.replace(to)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return to


def refuse_filled(to: Path) -> None:
    if to.is_dir() and not any(to.iterdir()):
        return
    if to.exists() or to.is_symlink():
        raise FileExistsError(
            f"{to} exists and is not an empty folder; choose another, or delete it"
        )


def wrapped(model: LanguageModel, tokenizer: Tokenizer | None = None) -> NRGPTForCausalLM:
    """The model as transformers knows it; its weights are shared, not copied."""
    wrapper = NRGPTForCausalLM(NRGPTConfig.from_model_config(model.cfg))
    wrapper.language_model = model
    if tokenizer is not None:
        wrapper.generation_config = GenerationConfig(**special_tokens(tokenizer))
    return wrapper.train(model.training)


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """What generation starts an empty prompt with, what ends a text, and whether to sample."""
    if isinstance(tokenizer, GPT2Tokenizer):
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return dict.fromkeys(names, tokenizer.end_of_text)
    if not isinstance(tokenizer, SymbolTokenizer):
        return {}
    if END in tokenizer.number:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        # transformers' pipeline samples unless told otherwise, and an answer is no matter of taste.
        return {**dict.fromkeys(names, tokenizer.number[END]), "do_sample": False}
    return {"bos_token_id": tokenizer.number.get("\n", 0)}


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
