"""lm-eval's model "nrgpt": a run folder, asked by the harness.

    lm_eval.simple_evaluate("nrgpt", "run=runs/mine,steps=8,batch_size=16", tasks=["wikitext"])
    python -m nrgpt.evaluate.harness run --model nrgpt --model_args run=runs/mine --tasks ...

Long texts. Of a context that does not fit before its continuation, the last tokens are kept; how
often that happened is in ``truncated``. A continuation is never cut: one longer than the model's
context is an error. ``loglikelihood_rolling`` reads texts of any length in the harness's windows;
``generate_until`` sees a text that outgrows the context as nrgpt.decode.generate does.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from ..data.tokenizer import GPT2Tokenizer, SymbolTokenizer
from ..decode.decoder import Decoder
from ..decode.generate import Sampling
from ..train.distributed import device_named
from ..train.runs import Run, load_run
from .extras import need

need("lm_eval", "nrgpt.evaluate.harness")

from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.utils import (  # noqa: E402
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

BATCH_SIZE = 16
MOST_NEW_TOKENS = 256
"""Of generate_until, where the task does not say."""

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
        """``run`` is a run folder; ``steps`` are inference steps, ``step`` is the checkpoint's.
        ``seed`` is for tasks that sample. ``max_batch_size`` is the harness's, and unused."""
        super().__init__()
        if not isinstance(run, Run):
            run = load_run(Path(run), step, device=harness_device(device))
        self.run, self.model = run, run.model
        self.steps = self.model.check_steps(steps)
        if batch_size == "auto":
            batch_size = BATCH_SIZE
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size = {batch_size!r}: must be at least 1, or 'auto'")
        self.batch_size = int(batch_size)
        self.seed = seed
        self._device = self.model.tokens.device
        self.truncated = 0
        """Contexts that were cut so far; one that several continuations share counts once."""

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        # The harness's command line always has a batch size; one in the model's arguments counts.
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**(given | arg_dict))

    @property
    def max_length(self) -> int:
        return self.model.cfg.context

    @property
    def eot_token_id(self) -> int:
        """What stands before a text that has no context: the end of the one before it. Characters
        have none; a newline comes closest."""
        tokenizer = self.run.tokenizer
        if isinstance(tokenizer, GPT2Tokenizer):
            return tokenizer.end_of_text
        assert isinstance(tokenizer, SymbolTokenizer)
        for symbol in ("<end>", "\n"):
            if symbol in tokenizer.number:
                return tokenizer.number[symbol]
        raise ValueError(
            "a text without a context needs a token to stand before it, and this vocabulary has "
            "neither an end of text nor a newline"
        )

    def stops(self) -> set[int]:
        """Tokens that end a text wherever they come."""
        tokenizer = self.run.tokenizer
        is_text = isinstance(tokenizer, SymbolTokenizer) and "<end>" not in tokenizer.number
        return set() if is_text else {self.eot_token_id}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        return self.run.encode(string)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        empty = [request.args[1] == "" for request in requests]
        some = [request for request, is_empty in zip(requests, empty, strict=True) if not is_empty]
        scores = iter(super().loglikelihood(some, disable_tqdm=True) if some else [])
        # Nothing is certain to follow anything.
        return [(0.0, True) if is_empty else next(scores) for is_empty in empty]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            before = len(pairs)
            pairs += [(("", ""), *make_disjoint_window(window)) for window in windows]
            counts.append(len(pairs) - before)
        scores = iter(self._loglikelihood_tokens(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], **options: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would say it.

        Requests that differ in their last token alone, such as the four letters of a multiple
        choice, share a forward pass. Rows are padded on their right, which a causal model does not
        see.
        """
        asked: dict[tuple[int, ...], list[int]] = {}
        cut = set()
        for i, (_, context, continuation) in enumerate(requests):
            asked.setdefault(self.fitting(context, continuation), []).append(i)
            if len(context) + len(continuation) - 1 > self.max_length:
                cut.add(tuple(context))
        self.truncated += len(cut)
        # The longest first: if memory does not suffice, that shows at once.
        inputs = sorted(asked, key=len, reverse=True)
        batches = [inputs[i : i + self.batch_size] for i in range(0, len(inputs), self.batch_size)]
        scores: dict[int, tuple[float, bool]] = {}
        for batch in track(batches, "likelihoods", disable=len(batches) < 2):
            x = self.last_states(batch)
            for row, tokens in zip(x, batch, strict=True):
                for length, same in by_length(asked[tokens], requests).items():
                    logits = self.model.readout(row[len(tokens) - length : len(tokens)])
                    for i in same:
                        scores[i] = score(logits, requests[i][2])
        return [scores[i] for i in range(len(requests))]

    def fitting(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """What the model is shown: all but the last token, less what does not fit at the start."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit into the model's "
                f"context = {self.max_length}, and a part of it would be another one; "
                "loglikelihood_rolling takes texts of any length"
            )
        return tuple([*context, *continuation][:-1][-self.max_length :])

    @torch.no_grad()
    def last_states(self, batch: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, batch))
        padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in batch]
        # Said here, since a GPU would not say it.
        self.model.check_vocabulary(torch.tensor(padded))
        idx = torch.tensor(padded, device=self.device)
        return self.model.last_state(idx, steps=self.steps, dropout=False)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        wanted = [options_of(request.args[1]) for request in requests]
        prompts = [self.tok_encode(request.args[0]) or [self.eot_token_id] for request in requests]
        self.truncated += sum(len(prompt) > self.max_length for prompt in prompts)
        # Only requests of the same options can share a batch; similar lengths waste the least.
        order = sorted(range(len(requests)), key=lambda i: (repr(wanted[i]), len(prompts[i])))
        said: dict[int, str] = {}
        for batch in track(list(self.batches(order, wanted)), "texts", disable=len(order) < 2):
            texts = self.continuations([prompts[i] for i in batch], *wanted[batch[0]])
            said.update(zip(batch, texts, strict=True))
        return [said[i] for i in range(len(requests))]

    def batches(self, order: Sequence[int], wanted: Sequence[Any]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in order:
            if batch and (len(batch) == self.batch_size or wanted[i] != wanted[batch[0]]):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    @torch.no_grad()
    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        until: tuple[str, ...],
        max_new_tokens: int,
        sampling: Sampling,
    ) -> list[str]:
        """The texts up to the first stop string of each, which may end, or begin, inside a token:
        the decoded text decides."""
        self.model.check_vocabulary(torch.tensor([t for prompt in prompts for t in prompt]))
        decoder = Decoder(self.model, prompts, "exact", self.steps)
        generator = torch.Generator(self._device).manual_seed(self.seed)
        stops = self.stops()
        new: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        running = list(range(len(prompts)))
        for _ in range(max_new_tokens):
            decoder.feed(sampling.choose(decoder.next_logits(), None, generator))
            tokens = decoder.read()
            goes_on = []
            for i, (row, token) in enumerate(zip(running, tokens, strict=True)):
                if token in stops:
                    continue
                new[row].append(token)
                texts[row], is_over = before_stop(self.run.decode(new[row]), until)
                if not is_over:
                    goes_on.append(i)
            running = [running[i] for i in goes_on]
            if not running:
                break
            if len(goes_on) < len(tokens):
                decoder.keep_rows(goes_on)
        return texts


def harness_device(device: str) -> str:
    """As the harness names devices; its command line says cuda:0 where nobody chose."""
    kind, _, number = device.partition(":")
    named = device_named("auto" if device == "cuda:0" else kind)
    return f"cuda:{number}" if named == "cuda" and number else named


def by_length(numbers: Sequence[int], requests: Sequence[Pair]) -> dict[int, list[int]]:
    """Requests by the number of their continuation's tokens."""
    lengths: dict[int, list[int]] = {}
    for i in numbers:
        lengths.setdefault(len(requests[i][2]), []).append(i)
    return lengths


def score(logits: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """Logits (tokens, vocabulary) that predict the continuation, and the continuation."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    tokens = torch.tensor(continuation, device=logits.device)
    chosen = logits.log_softmax(-1).gather(1, tokens[:, None])
    is_greedy = bool((logits.argmax(-1) == tokens).all())
    return chosen.double().sum().item(), is_greedy


def before_stop(text: str, until: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of the stop strings, and whether there was one."""
    found = [at for stop in until if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def options_of(options: Mapping[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
    """Stop strings, most new tokens and sampling of a request, as tasks write them."""
    known = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks"}
    options = {k: v for k, v in options.items() if (k, v) != ("num_beams", 1)}
    if "max_new_tokens" in options:  # a few tasks have transformers' name for it
        options["max_gen_toks"] = options.pop("max_new_tokens")
    if unknown := set(options) - known:
        raise ValueError(
            f"generation options {sorted(unknown)}: must be among {', '.join(sorted(known))}"
        )
    until = options.get("until") or []
    until = (until,) if isinstance(until, str) else tuple(until)
    temperature = float(options.get("temperature", 1.0 if options.get("do_sample") else 0.0))
    if options.get("do_sample") is False:
        temperature = 0.0
    sampling = Sampling(
        temperature=temperature, top_k=options.get("top_k") or None, top_p=options.get("top_p")
    )
    return (
        tuple(stop for stop in until if stop),
        int(options.get("max_gen_toks", MOST_NEW_TOKENS)),
        sampling,
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
