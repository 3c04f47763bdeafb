"""What the explorer's page asks of Python when its model is too large for the page: the same
questions that static/engine.js and static/landscape.js answer for small ones."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.tokenizer import Tokenizer
from ..decode.generate import generate
from ..explore.server import Answer
from ..model.network import Network
from ..model.step import Extra
from .altered import altered
from .attention import attention_weights
from .figures import token_label
from .page import record_of, rows
from .regularise import Toward
from .survey import survey
from .trajectory import trajectory

MOST_STEPS = 1_000
WORDS = re.compile(r"<end>|[A-Za-z_]+|\d+|.", re.DOTALL)


class Answers:
    """Of one model. Questions hold tokens and the page's settings."""

    QUESTIONS = ("read", "roll", "attention", "landscape", "next")

    def __init__(
        self,
        model: Network,
        tokenizer: Tokenizer,
        encode: Callable[[str], list[int]] | None = None,
    ):
        """``encode``: how texts are read, if not by the tokenizer alone."""
        self.model, self.label = model, token_label(tokenizer)
        self.encode = encode or tokenizer.encode
        self.is_characters = tokenizer.kind == "characters"
        self.force: float | None = None

    def by_name(self) -> dict[str, Answer]:
        return {name: getattr(self, name) for name in self.QUESTIONS}

    def read(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The tokens of a text, without the characters or words that the model does not know."""
        text = str(asked["text"])
        parts = list(text) if self.is_characters else WORDS.findall(text)
        unknown = [] if self.knows(text) else [p for p in dict.fromkeys(parts) if not self.knows(p)]
        tokens = self.encode("".join(part for part in parts if part not in unknown))
        return {"tokens": tokens, "unknown": unknown, "texts": self.texts(tokens)}

    def knows(self, text: str) -> bool:
        try:
            self.encode(text)
        except ValueError:
            return False
        return True

    def roll(self, asked: dict[str, Any]) -> dict[str, Any]:
        model, idx, extra, steps = self.under(asked)
        has_energy = model.cfg.block == "nrgpt"
        top = min(5, model.cfg.vocab_size)
        seen = trajectory(model, idx, steps=steps, extra=extra, energies=has_energy, top=top)
        record = record_of(seen)
        numbers = {n for state in record["said"] for token in state for n in token}
        return record | {"texts": self.texts([*record["tokens"], *numbers])}

    def attention(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Whom a token looks at: weights of the tokens that it sees, by step and head."""
        model, idx, extra, steps = self.under(asked)
        cfg, steps = model.cfg, model.check_steps(steps)
        idx = idx[:, : whole(asked, "token", 0, idx.shape[1] - 1) + 1]
        looks = steps + (cfg.block != "gpt")  # the last state looks too, unless there is no block
        found = attention_weights(model, idx, steps=looks, extra=extra, last=True)[:, 0, :, 0]
        is_strict = cfg.block == "nrgpt" and cfg.mask == "strict"
        return {"heads": [rows(step) for step in (found[..., :-1] if is_strict else found)]}

    def landscape(self, asked: dict[str, Any]) -> dict[str, Any]:
        model, idx, extra, steps = self.under(asked)
        token = whole(asked, "token", 0, idx.shape[1] - 1)
        found = survey(model, idx, token, steps=steps, starts=8, count=41, extra=extra)
        return found.record() | {"texts": self.texts(found.said.flatten().tolist())}

    def next(self, asked: dict[str, Any]) -> dict[str, Any]:
        model, idx, extra, steps = self.under(asked)
        temperature = number(asked["settings"], "temperature", 0, 100)
        options = {"max_new_tokens": 1, "temperature": temperature, "steps": steps, "extra": extra}
        ((token,),) = generate(model, idx.tolist(), **options)  # type: ignore[arg-type]
        return {"token": token, "texts": self.texts([token])}

    def under(self, asked: dict[str, Any]) -> tuple[Network, Tensor, Extra | None, int | None]:
        """The model under the page's settings, the tokens, an energy of one's own, the steps."""
        settings = asked["settings"]
        tokens = [int(token) for token in asked["tokens"]]
        idx = torch.tensor([tokens], device=self.model.tokens.device)
        self.model.check_tokens(idx)
        self.model.check_vocabulary(idx)
        steps = None
        if settings.get("steps") is not None:
            steps = whole(settings, "steps", 1, MOST_STEPS)
        cone = settings.get("cone")
        rate, beta = (number(settings, name, 0.01, 100) for name in ("rate", "beta"))
        model = altered(self.model, rate=rate, beta=beta, cone=None if cone is None else bool(cone))
        return model, idx, self.pull(settings, idx), steps

    @torch.no_grad()
    def pull(self, settings: dict[str, Any], idx: Tensor) -> Extra | None:
        """Towards the tokens of a word, in units of the mean force on a text's first states."""
        weight = number(settings, "weight", -10, 10)
        tokens = self.read({"text": settings.get("word", "")})["tokens"]
        if not weight or not tokens or self.model.cfg.block != "nrgpt":
            return None
        if self.force is None:
            self.force = mean_force(self.model, idx)
        return {"own": Toward(direction(self.model, tokens), weight * self.force)}

    def texts(self, tokens: Any) -> dict[int, str]:
        return {n: self.label(n) for n in sorted(set(tokens))}


def direction(model: Network, tokens: list[int]) -> Tensor:
    """What pulls a token towards saying these."""
    pull = model.head_weight[tokens].mean(0)
    norm = model.final_norm
    return pull if norm.gamma is None else norm.centred(norm.gamma * pull)


def mean_force(model: Network, idx: Tensor) -> float:
    force = trajectory(model, idx, readouts=False).force
    assert force is not None
    return float(force.mean())


def whole(asked: dict[str, Any], name: str, least: int, most: int) -> int:
    return int(number(asked, name, least, most))


def number(asked: dict[str, Any], name: str, least: float, most: float) -> float:
    value = asked[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ValueError(f"{name} = {value!r}: must be a number in {least:g} .. {most:g}")
    return float(value)
