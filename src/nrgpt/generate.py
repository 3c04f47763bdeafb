"""Continue texts: prompts of unequal length, greedy or sampled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .model import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    steps: int | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to ``max_new_tokens`` or before the token ``stop``.

    Temperature 0 is greedy. Past the model's context, the oldest tokens drop out of sight.
    Prompts of unequal length stand left-aligned: what follows a token cannot change it.
    """
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt must hold at least one token")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature}: must be at least 0 (greedy) and finite")
    device = model.tokens.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = len(prompts)
    text = torch.zeros(rows, int(lengths.max()) + max_new_tokens, dtype=torch.long, device=device)
    for row, prompt in zip(text, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    starts = lengths.clone()
    running = torch.arange(rows, device=device)  # the rows that have not stopped
    with evaluating(model):
        for _ in range(max_new_tokens):
            last = next_logits(model, text[running], lengths[running], steps)
            token = choose(last, temperature, generator)
            text[running, lengths[running]] = token
            lengths[running] += 1
            if stop is not None:
                running = running[token != stop]
                if len(running) == 0:
                    break
    spans = zip(text.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    new = [row[start:end] for row, start, end in spans]
    return [tokens[:-1] if stop is not None and tokens[-1:] == [stop] else tokens for tokens in new]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and back to how it was however that ends."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def next_logits(model: LanguageModel, text: Tensor, lengths: Tensor, steps: int | None) -> Tensor:
    """Logits after the last token of each row, from at most ``context`` tokens before it."""
    context = model.cfg.context
    span = min(int(lengths.max()), context)
    first = (lengths - context).clamp(min=0)
    columns = (first[:, None] + torch.arange(span, device=text.device)).clamp(max=text.shape[1] - 1)
    logits, _ = model(text.gather(1, columns), steps=steps)
    at = lengths - first - 1
    return logits[torch.arange(len(text), device=text.device), at].float()


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
