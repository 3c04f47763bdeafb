"""What is measured when a run has finished."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ..data.listops import read_tests
from ..data.masking import Masking
from ..data.shards import Dataset
from ..decode.generate import generate
from ..files import sealed, write_atomically
from ..language_model import LanguageModel
from ..measure.listops import listops_accuracy
from ..measure.loss import masked_loss, split_loss
from .config import TrainConfig
from .report import plot_losses
from .speed import autocast


def write_result(
    run: Path | None,
    model: LanguageModel,
    dataset: Dataset,
    cfg: TrainConfig,
    state: dict[str, Any],
    *,
    progress: bool = False,
) -> None:
    """Measure a finished run, and write result.json, samples.txt and losses.png into its folder.

    The loss counts every token of the validation split. It is computed in the precision of
    training: bfloat16 changes it by less than 1e-4, and float32 takes many times as long on a GPU.
    With several processes all must take part, but only the first has a folder to write into.
    """
    result: dict[str, Any] = {
        "step": state["step"],
        "best_val_loss_estimate": state["best"].get("val_loss"),
        "best_step": state["best"].get("step"),
        "rollbacks": state["rollbacks"],
        "dataset": dataset.fingerprint,
    }
    shown = progress and run is not None
    if cfg.final_evaluation:
        with autocast(cfg, model.tokens.device):
            if cfg.masking is None:
                whole = split_loss(model, dataset.tokens("val"), progress=shown)
            else:
                whole = masked_loss(model, dataset.tokens("val"), cfg.masking)
        result |= {
            "val_loss_full": whole.loss,
            "val_loss_full_tokens": whole.tokens,
            "val_loss_full_least_context": whole.least_context,
        }
    result["parameters"] = dataclasses.asdict(model.parameter_counts())
    if cfg.final_evaluation and cfg.data.task == "listops" and cfg.masking is None:
        tests = read_tests(dataset.folder)
        found = listops_accuracy(model, tests, dataset.tokenizer, progress=shown)
        result["listops"] = found.as_dict()
    continued = None
    if cfg.final_evaluation:
        masking = cfg.masking
        continued = completed(model, dataset, masking) if masking else samples(model, dataset)
    if run is not None:
        if continued is not None:
            write_atomically(run / "samples.txt", continued)
        write_atomically(run / "result.json", sealed(result))
        plot_losses(run)


def samples(model: LanguageModel, dataset: Dataset, *, number: int = 3, seed: int = 0) -> str:
    """Some validation windows, each continued by the model at temperature 0.8. Where the vocabulary
    is missing, their tokens are given by number."""
    context = model.cfg.context
    stream = dataset.tokens("val")
    starts, _ = stream.batch(seed=seed, step=0, size=number, context=max(1, context // 4))
    generator = torch.Generator(model.tokens.device).manual_seed(seed)
    options: dict[str, Any] = {"temperature": 0.8, "generator": generator}
    try:
        new = generate(model, starts.tolist(), max_new_tokens=context // 2, **options)
    except ValueError as error:  # the result counts more than its samples
        return f"{error}\n"
    decode = str if dataset.tokenizer.missing() else dataset.tokenizer.decode
    texts = [
        f"{decode(start)} ⟶ {decode(continuation)}"
        for start, continuation in zip(starts.tolist(), new, strict=True)
    ]
    return "\n\n--------\n\n".join(texts) + "\n"


@torch.no_grad()
def completed(model: LanguageModel, dataset: Dataset, masking: Masking, *, number: int = 3) -> str:
    """Some validation windows with missing tokens, as gaps, and as the model completes them."""
    stream = dataset.tokens("val")
    texts, _ = stream.batch(seed=0, step=0, size=number, context=model.cfg.context)
    masked, _ = masking(texts, seed=0, step=0)
    logits, _ = model(masked.to(model.tokens.device), dropout=False)
    assert logits is not None
    is_missing = masked == masking.token
    filled = torch.where(is_missing, logits[..., : masking.token].argmax(-1).cpu(), masked)
    decode = str if dataset.tokenizer.missing() else dataset.tokenizer.decode
    shown = []
    for gaps, text in zip(masked.tolist(), filled.tolist(), strict=True):
        pieces = ["_" if token == masking.token else decode([token]) for token in gaps]
        shown.append(f"{''.join(pieces)} \u27f6 {decode(text)}")
    return "\n\n--------\n\n".join(shown) + "\n"
