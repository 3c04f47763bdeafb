"""A run folder as lm-eval's model "nrgpt". lm-eval is "the harness" below.

    lm_eval.simple_evaluate("nrgpt", "run=runs/mine,steps=8,batch_size=16", tasks=["wikitext"])
    python -m nrgpt.evaluate.harness run --model nrgpt --model_args run=runs/mine --tasks ...

docs/evaluation.md says what happens to texts that are longer than the model's context.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ..data.tokenizer import start_of_text
from ..decode.generate import Sampling, stream
from ..extras import need
from ..train.distributed import device_named
from ..train.runs import Run, load_run
from .likelihood import likelihoods

need("lm_eval", "nrgpt.evaluate.harness")

from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.utils import Collator  # noqa: E402
from lm_eval.utils import (  # noqa: E402
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

BATCH_SIZE = 16
MOST_NEW_TOKENS = 256  # for generate_until, if the task does not say

Pair = tuple[tuple[str, str], list[int], list[int]]  # texts, context tokens, continuation tokens


@register_model("nrgpt")
class HarnessModel(TemplateLM):
    def __init__(
        self,
        run: str | Path | Run,
        steps: int | None = None,
        batch_size: int | str = BATCH_SIZE,
        device: str = "auto",
        step: int | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
    ):
        """``steps`` are inference steps; ``step`` selects the checkpoint. ``seed`` is for tasks
        that sample. The harness passes ``max_batch_size``, which is not used."""
        super().__init__()
        if not isinstance(run, Run):
            run = load_run(Path(run), step, device=harness_device(device))
        self.run, self.model = run, run.model
        self.steps = self.model.check_steps(steps)
        batch_size = BATCH_SIZE if batch_size == "auto" else batch_size
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size = {batch_size!r}: must be at least 1, or 'auto'")
        self.batch_size = int(batch_size)
        self.seed = seed
        self._device = self.model.tokens.device
        self.truncated = 0
        """Contexts cut so far. One that several continuations share counts once."""

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        # The harness always passes a batch size; one in the model's arguments takes precedence.
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**(given | arg_dict))

    @property
    def max_length(self) -> int:
        return self.model.cfg.context

    @property
    def eot_token_id(self) -> int:
        """What precedes a text without a context: the end of a document or, for characters,
        a newline."""
        return start_of_text(self.run.tokenizer)

    def stops(self) -> set[int]:
        """Tokens that end a text."""
        end = self.run.tokenizer.end_of_text
        return set() if end is None else {end}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        return self.run.encode(string)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """An empty continuation is certain; the rest is up to the harness."""
        asked = [request for request in requests if request.args[1]]
        scores = iter(super().loglikelihood(asked, disable_tqdm=True))
        return [next(scores) if request.args[1] else (0.0, True) for request in requests]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            )
            before = len(pairs)
            pairs += [(("", ""), *make_disjoint_window(window)) for window in windows]
            counts.append(len(pairs) - before)
        scores = iter(self._loglikelihood_tokens(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], **options: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found = likelihoods(self.model, pairs, steps=self.steps, batch_size=self.batch_size)
        self.truncated += found.cut
        return found.scores

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [
            (self.tok_encode(prompt) or [self.eot_token_id], options_of(options))
            for prompt, options in (request.args for request in requests)
        ]
        self.truncated += sum(len(prompt) > self.max_length for prompt, _ in asked)
        # A batch needs the same options throughout; similar lengths waste the least.
        collator = Collator(asked, lambda one: len(one[0]), lambda one: one[1], "gen_kwargs")
        batches = list(collator.get_batched(self.batch_size))
        texts: list[str] = []
        for batch in track(batches, "texts", disable=len(asked) < 2):
            texts += self.continuations([prompt for prompt, _ in batch], *batch[0][1])
        return collator.get_original(texts)

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        until: tuple[str, ...],
        max_new_tokens: int,
        sampling: Sampling,
    ) -> list[str]:
        """Each text up to its first stop string. Stop strings may begin or end inside a token, so
        they are looked for in the decoded text."""
        new: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        running = set(range(len(prompts)))
        for tokens in stream(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop=self.stops(),
            sampling=sampling,
            generator=torch.Generator(self.device).manual_seed(self.seed),
            steps=self.steps,
        ):
            running &= tokens.keys()
            for row in sorted(running):
                new[row].append(tokens[row])
                texts[row], is_over = before_stop(self.run.decode(new[row]), until)
                if is_over:
                    running.remove(row)
            if not running:
                break
        return texts


def harness_device(device: str) -> str:
    """A device by the harness's name. Its command line says cuda:0 if the user chose none."""
    kind, _, number = device.partition(":")
    named = device_named("auto" if device == "cuda:0" else kind)
    return f"cuda:{number}" if named == "cuda" and number else named


def before_stop(text: str, until: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there is one."""
    found = [at for stop in until if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def options_of(options: Mapping[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
    """Stop strings, the largest number of new tokens, and sampling, as tasks write them."""
    known = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks"}
    options = {k: v for k, v in options.items() if (k, v) != ("num_beams", 1)}
    if "max_new_tokens" in options:  # transformers' name, which a few tasks use
        options["max_gen_toks"] = options.pop("max_new_tokens")
    if unknown := set(options) - known:
        raise ValueError(
            f"generation options {sorted(unknown)}: must be among {', '.join(sorted(known))}"
        )
    until = options.get("until") or []
    samples = options.get("do_sample")
    temperature = options.get("temperature", 1.0 if samples else 0.0)
    sampling = Sampling(
        temperature=0.0 if samples is False else float(temperature),
        top_k=options.get("top_k") or None,
        top_p=options.get("top_p"),
    )
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    return stops, int(options.get("max_gen_toks", MOST_NEW_TOKENS)), sampling


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
