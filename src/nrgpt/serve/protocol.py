"""What a client may ask for, and what it is told: OpenAI's text completions, with a few additions.

Additions to a request: ``steps``, ``adaptive``, ``energies``, ``top_k`` and ``repetition_penalty``.
A choice may have ``energies``, one entry for each token, and ``steps``.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..dynamics.relax import RuleName, Stop
from ..text_model import TextModel
from .engine import Token


class Refused(Exception):
    """The request cannot be served. ``status`` is HTTP's."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


class Strict(BaseModel):
    """A misspelt field is an error."""

    model_config = ConfigDict(extra="forbid")


class Adaptive(Strict):
    """Each token stops early by a rule, as in nrgpt.dynamics.relax.Stop."""

    rule: RuleName = "kl"
    tolerance: float = Field(1e-2, ge=0)
    patience: int = Field(1, ge=1, le=10_000)
    minimum: int = Field(1, ge=0, le=10_000)

    def stop(self) -> Stop:
        return Stop(self.rule, self.tolerance, self.patience, self.minimum)


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionRequest(Strict):
    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: int | None = Field(16, ge=0)
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    n: int | None = Field(1, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    stop: str | list[str] | None = None
    seed: int | None = None
    user: str | None = None
    # Ours:
    top_k: int | None = Field(None, ge=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    steps: int | None = Field(None, ge=1, description="Inference steps; default as trained.")
    adaptive: Adaptive | None = None
    energies: bool = Field(False, description="Each token's energies in its last state.")
    # OpenAI's, of which only the values without effect are taken:
    best_of: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    suffix: Literal[""] | None = None

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def prompts(self, model: TextModel) -> list[list[int]]:
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise Refused(400, "prompt: must hold at least one text", "prompt")
        return [self.tokens_of(one, model) for one in given]

    def tokens_of(self, prompt: str | Sequence[int], model: TextModel) -> list[int]:
        size, context = model.model.cfg.vocab_size, model.model.cfg.context
        try:
            tokens = model.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except ValueError as error:
            raise Refused(400, f"prompt: {error}", "prompt") from error
        if not tokens or min(tokens) < 0 or max(tokens) >= size:
            raise Refused(400, f"prompt: tokens must be in 0 .. {size - 1}, one at least", "prompt")
        if len(tokens) > context:
            raise Refused(
                400, f"prompt: {len(tokens)} tokens; this model's context is {context}", "prompt"
            )
        return tokens


class Writer:
    """The text of one choice, token by token, up to a stop string. Text that might be the beginning
    of one is held back, and so is half a character."""

    def __init__(
        self, model: TextModel, index: int, prompt: list[int], echo: bool, stops: list[str]
    ):
        self.model, self.index, self.stops = model, index, stops
        self.context = [] if echo else list(prompt)
        """Tokens before the first that is written."""
        self.before = model.decode(self.context) if self.context else ""
        self.echoed = len(prompt) if echo else 0
        self.numbers: list[int] = []
        self.tokens: list[Token] = []
        """Not told yet."""
        self.text, self.told, self.reason = "", 0, ""
        self.offset = 0

    def add(self, token: Token) -> None:
        self.numbers.append(token.number)
        self.tokens.append(token)
        whole = self.model.decode([*self.context, *self.numbers])
        self.text = whole[len(self.before) :]
        if len(self.numbers) <= self.echoed:
            return
        found = [at for stop in self.stops if (at := self.text.find(stop, self.begin())) >= 0]
        if found:
            self.text, self.reason = self.text[: min(found)], "stop"

    def begin(self) -> int:
        """Where a stop string may be: not in an echoed prompt."""
        return len(self.model.decode(self.numbers[: self.echoed])) if self.echoed else 0

    def ready(self) -> int:
        """How much of the text is certain."""
        if self.reason:
            return len(self.text)
        whole = len(self.text.rstrip("\ufffd"))
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for at in range(max(self.told, whole - longest), whole):
            if any(stop.startswith(self.text[at:whole]) for stop in self.stops):
                return at
        return whole

    def choice(self, request: CompletionRequest) -> dict[str, Any]:
        """What there is to tell since the last call."""
        end = max(self.told, self.ready())
        tokens, self.tokens = self.tokens, []
        said: dict[str, Any] = {
            "index": self.index,
            "text": self.text[self.told : end],
            "finish_reason": self.reason or None,
            "logprobs": None,
        }
        self.told = end
        if request.logprobs is not None:
            said["logprobs"] = self.logprobs(tokens)
        if request.energies:
            said["energies"] = [token.energies for token in tokens]
        if request.adaptive is not None:
            said["steps"] = [token.steps for token in tokens]
        return said

    def logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        name = self.model.tokenizer.decode
        names, offsets = [name([token.number]) for token in tokens], []
        for piece in names:
            offsets.append(self.offset)
            self.offset += len(piece)
        tops = [{name([number]): value for number, value in token.top} for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [top or None for top in tops],
            "text_offset": offsets,
        }


class Answer:
    """The parts of an answer that its chunks share."""

    def __init__(self, model: str, prompt_tokens: int):
        self.shared = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.prompt_tokens = prompt_tokens

    def whole(self, choices: list[dict[str, Any]], new: int) -> dict[str, Any]:
        return {**self.shared, "choices": choices, "usage": self.usage(new)}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self.shared, 'choices': choices, **more})}\n\n"

    def usage(self, new: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }
