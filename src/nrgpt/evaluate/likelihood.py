"""How likely does a model find a continuation, after a context?"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..model.network import Network


class Likelihoods(NamedTuple):
    scores: list[tuple[float, bool]]
    """The log-probability of each continuation, and whether greedy decoding would produce it."""
    cut: int
    """Contexts that were too long. One that several continuations share counts once."""


@torch.no_grad()
def likelihoods(
    model: Network,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    steps: int | None = None,
    batch_size: int = 16,
) -> Likelihoods:
    """Of pairs of a context, at least one token, and a continuation. The ends of long contexts
    count.

    Pairs that differ only in their last token, such as the four letters of a multiple choice, share
    a forward pass. Rows are padded on the right, where a causal model does not look.
    """
    context = model.cfg.context
    asked: dict[tuple[int, ...], list[int]] = {}
    cut = set()
    for i, (before, continuation) in enumerate(pairs):
        if len(continuation) > context:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit into the model's "
                f"context = {context}, and cutting it would change the question; "
                "loglikelihood_rolling takes texts of any length"
            )
        tokens = (*before, *continuation[:-1])
        asked.setdefault(tokens[-context:], []).append(i)
        if len(tokens) > context:
            cut.add(tuple(before))
    # Longest first: if memory runs out, it does so at once.
    inputs = sorted(asked, key=len, reverse=True)
    batches = [inputs[i : i + batch_size] for i in range(0, len(inputs), batch_size)]
    scores: dict[int, tuple[float, bool]] = {}
    for batch in track(batches, "likelihoods", disable=len(batches) < 2):
        idx = pad_sequence([torch.tensor(tokens) for tokens in batch], batch_first=True)
        model.check_vocabulary(idx)  # on the CPU: a GPU would not name the token
        x = model.last_state(idx.to(model.tokens.device), steps=steps, dropout=False)
        for row, tokens in zip(x, batch, strict=True):
            continuations = {i: pairs[i][1] for i in asked[tokens]}
            longest = max(map(len, continuations.values()))
            logits = model.readout(row[len(tokens) - longest : len(tokens)])
            for i, continuation in continuations.items():
                scores[i] = score(logits[longest - len(continuation) :], continuation)
    return Likelihoods([scores[i] for i in range(len(pairs))], len(cut))


def score(logits: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """``logits`` (tokens, vocabulary) predict the continuation."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    tokens = torch.tensor(continuation, device=logits.device)
    chosen = logits.log_softmax(-1).gather(1, tokens[:, None])
    return chosen.cpu().double().sum().item(), torch.equal(logits.argmax(-1), tokens)
