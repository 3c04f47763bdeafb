"""What the page is told of a model: its name, its words, its certificate, and its weights."""

from collections.abc import Sequence
from typing import Any

import torch

from ..data.tokenizer import SymbolTokenizer, Tokenizer
from ..model.certificate import Certificate
from ..model.network import Network
from .weights import NotForThePage, describe, is_small_enough


def about(
    model: Network,
    tokenizer: Tokenizer,
    name: str,
    *,
    what: str = "",
    expressions: bool = False,
    examples: Sequence[str] = (),
) -> dict[str, Any]:
    """Without weights. ``expressions``: texts are ListOps, as people write it."""
    model.check_continues("nrgpt explore")
    has_energy = model.cfg.block == "nrgpt"
    return {
        "name": name,
        "what": what,
        "steps": model.cfg.steps,
        "most_steps": model.cfg.steps if model.cfg.block == "gpt" else None,
        "context": model.cfg.context,
        "parameters": model.parameter_counts().total,
        "symbols": tokenizer.symbols if isinstance(tokenizer, SymbolTokenizer) else None,
        "expressions": expressions,
        "end": tokenizer.end_of_text,
        "examples": list(examples),
        "terms": list(model.energy_block.terms) if has_energy else [],
        "cone": has_energy and model.energy_block.safeguard,
        "settled": model.is_settled,
        "certificates": certificates(model),
    }


def for_page(model: Network, tokenizer: Tokenizer, name: str, **more: Any) -> dict[str, Any]:
    """With weights, for the engine in the page. NotForThePage if it cannot run there."""
    if not isinstance(tokenizer, SymbolTokenizer):
        raise NotForThePage(f"the page cannot make the tokens of a {type(tokenizer).__name__}")
    if not is_small_enough(model):
        raise NotForThePage(
            f"{model.parameter_counts().total:,} parameters are too many for a page"
        )
    return about(model, tokenizer, name, **more) | {"engine": describe(model)}


@torch.no_grad()
def certificates(model: Network) -> dict[str, Any]:
    """What is proved of the model as it is, and with and without the cone."""
    found = {"as_is": told(model.guarantees())}
    if model.cfg.block == "nrgpt":
        block, kept = model.energy_block, model.energy_block.safeguard
        for name, has_cone in (("cone", True), ("no_cone", False)):
            block.safeguard = has_cone
            found[name] = told(model.guarantees())
        block.safeguard = kept
    return found


def told(certificate: Certificate) -> dict[str, Any]:
    findings = [{"part": f.part, "level": f.level.name, "why": f.why} for f in certificate.findings]
    return {
        "level": certificate.level.name,
        "title": certificate.title,
        "findings": findings,
    }
