"""How much each token looks at each earlier one.

No kernel makes these weights, so they are computed on the side: the model runs with a memory whose
pasts write down what they are asked. That works for every block, and for terms of your own.
"""

import torch
from torch import Tensor

from ..model.network import Network
from ..model.past import Past, Shown, WholeText
from ..model.step import Extra


class Noted(WholeText):
    """A text whose tokens see one another, and which notes the weights of every look."""

    def __init__(self, t: int | None, shown: Shown | None, notes: "Notes"):
        super().__init__(t, shown)
        self.notes = notes

    def at(self, t: int | None) -> "Noted":
        return Noted(t, self.shown, self.notes)

    def attend(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        keys, sees = self.visible(strict=strict)
        rows, sees = (q[:, :, -1:], sees[:, :, -1:]) if self.notes.last else (q, sees)
        scores = scale * rows @ keys.mT.expand(-1, q.shape[1], -1, -1)
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        # A token that sees nothing has no weights.
        self.notes.looks.setdefault(self.t, []).append(weights.nan_to_num(0.0))
        return super().attend(q, scale, strict=strict)


class Notes:
    """A memory for one whole text. ``last``: only the last token's looks are kept."""

    def __init__(self, last: bool) -> None:
        self.last = last
        self.looks: dict[int | None, list[Tensor]] = {}

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        return Noted(t, shown, self)


@torch.no_grad()
def attention_weights(
    model: Network,
    idx: Tensor,
    *,
    steps: int | None = None,
    extra: Extra | None = None,
    last: bool = False,
) -> Tensor:
    """Weights of all tokens ``idx`` (batch, tokens) at every step: (steps, batch, heads, tokens,
    tokens). Each row sums to 1, or to 0 for a token that sees nothing (the first one of a strict
    mask). Several terms with attention stand side by side, as further heads. ``last``: of the last
    token alone, which takes less memory: (steps, batch, heads, 1, tokens).

    >>> import nrgpt, torch
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
    >>> nrgpt.LanguageModel(cfg).attention(torch.randint(65, (1, 10))).shape
    torch.Size([8, 1, 2, 10, 10])
    """
    steps = model.check_steps(steps)
    model.check_tokens(idx)
    notes = Notes(last)
    positions = torch.arange(idx.shape[1], device=idx.device).expand_as(idx)
    model.extend(idx, positions, model.plan(extra), notes, steps=steps)
    looks = [torch.cat(notes.looks[t], dim=1) for t in range(steps) if notes.looks.get(t)]
    if len(looks) < steps:
        raise ValueError("this model has steps without attention: there are no weights to show")
    return torch.stack(looks)
