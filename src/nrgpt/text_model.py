"""A trained model and its tokenizer, to be used with text.

>>> import nrgpt
>>> model = nrgpt.load("zoo:shakespeare_certified", device="cpu")
>>> new = model.generate("ROMEO:", max_new_tokens=20, seed=1)
>>> sorted(model.energies("ROMEO:"))
['attention', 'feedforward', 'total']
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from . import zoo
from .check import suggestion
from .data.listops import as_written
from .data.tokenizer import Tokenizer, start_of_text
from .decode.decoder import CacheKind
from .decode.generate import Sampling, stream
from .dynamics.figures import token_label
from .dynamics.trajectory import Trajectory, trajectory
from .interop.exported import is_export, read_export, read_tokenizer
from .language_model import LanguageModel
from .model.network import IGNORED_TARGET
from .model.step import Extra
from .train.distributed import device_named
from .train.runs import Run, load_run


class Codec(Protocol):
    """A run or a tokenizer: ListOps' expressions may be written as people write them."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class TextModel:
    """``model`` and ``tokenizer``, and what one does with both. From ``nrgpt.load``."""

    def __init__(self, name: str, model: LanguageModel, tokenizer: Tokenizer, codec: Codec):
        self.name, self.model, self.tokenizer, self.codec = name, model, tokenizer, codec

    def __repr__(self) -> str:
        return f"TextModel({self.name!r}, {self.model.summary()})"

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. An empty one is what precedes a text."""
        return self.codec.encode(text) or [start_of_text(self.tokenizer)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.codec.decode(tokens)

    def pieces(self, text: str) -> list[str]:
        """What each token of a text stands for."""
        return [self.tokenizer.decode([token]) for token in self.encode(text)]

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...

    def generate(self, prompts: str | Sequence[str], **options: Any) -> str | list[str]:
        """What the model writes after a prompt, or after each of several. The options are those of
        ``stream``."""
        if isinstance(prompts, str):
            return "".join(self.stream(prompts, **options))
        texts = [self.encode(prompt) for prompt in prompts]
        starts = [len(text) for text in texts]
        for tokens in self.tokens(texts, **options):
            for row, token in tokens.items():
                texts[row].append(token)
        written = zip(texts, starts, strict=True)
        return [self.written_after(text, start) for text, start in written]

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """What the model writes after a prompt, piece by piece.

        Options: ``max_new_tokens`` (200), ``temperature`` (0 is greedy; default 0.8, and 0 for
        ListOps, where one answer is right), ``top_k``, ``top_p``,
        ``repetition_penalty``, ``seed`` (0), ``steps`` (inference steps; default as trained),
        ``cache`` ("exact", "frozen", "none") and ``extra`` terms of the energy.
        """
        text = self.encode(prompt)
        start, said = len(text), ""
        for tokens in self.tokens([list(text)], **options):
            text += tokens.values()
            whole = self.written_after(text, start).rstrip("\ufffd")  # half of a character waits
            yield whole[len(said) :]
            said = whole
        yield self.written_after(text, start)[len(said) :]

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 200,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        steps: int | None = None,
        cache: CacheKind = "exact",
        extra: Extra | None = None,
    ) -> Iterator[dict[int, int]]:
        """The new token of each row that has not stopped."""
        end = self.tokenizer.end_of_text
        if temperature is None:
            temperature = 0.0 if self.tokenizer.kind == "symbols" else 0.8
        return stream(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop=() if end is None else end,
            sampling=Sampling(repetition_penalty, temperature, top_k, top_p),
            generator=torch.Generator(self.device).manual_seed(seed),
            steps=steps,
            cache=cache,
            extra=extra,
        )

    def written_after(self, text: Sequence[int], start: int) -> str:
        """The text from token ``start`` on, as it continues what is before."""
        return self.decode(text)[len(self.decode(text[:start])) :]

    def trajectory(self, text: str, **options: Any) -> Trajectory:
        """Every token's energies, forces and readouts over the steps; see nrgpt.trajectory. Each
        token's target is the next one."""
        tokens = self.encode(text)
        idx = torch.tensor([tokens], device=self.device)
        targets = torch.tensor([[*tokens[1:], IGNORED_TARGET]], device=self.device)
        top, has_energy = min(5, self.model.cfg.vocab_size), self.model.is_watched
        options = {"energies": has_energy, "top": top} | options
        return replace(
            trajectory(self.model, idx, targets, **options), label=token_label(self.tokenizer)
        )

    @torch.no_grad()
    def energies(
        self, text: str, *, steps: int | None = None, extra: Extra | None = None
    ) -> dict[str, Tensor]:
        """The energy of each token after the last step: the total, and each term's, (tokens,)."""
        idx = torch.tensor([self.encode(text)], device=self.device)
        _ = self.model.energy_block  # raises for a baseline
        states = self.model.states(idx, steps=steps, extra=extra, dropout=False)
        start = x = next(states)
        for x in states:  # noqa: B007
            pass
        energies = self.model.energies(x, extra, start=start)
        found = {name: energy[0].cpu() for name, energy in energies.items()}
        return {"total": torch.stack(list(found.values())).sum(0), **found}

    def attention(
        self, text: str, *, steps: int | None = None, extra: Extra | None = None
    ) -> Tensor:
        """How much each token looks at each earlier one, (steps, heads, tokens, tokens)."""
        idx = torch.tensor([self.encode(text)], device=self.device)
        return self.model.attention(idx, steps=steps, extra=extra)[:, 0].cpu()

    @property
    def device(self) -> torch.device:
        return self.model.tokens.device


def load(
    source: str | Path | Run, *, checkpoint: int | None = None, device: str = "auto"
) -> TextModel:
    """A trained model: ``zoo:NAME``, a run folder (at its best checkpoint, or at the iteration
    ``checkpoint``), or a folder made by `nrgpt export`."""
    if isinstance(source, Run):
        return of_run(source)
    folder, where = zoo.resolve(str(source).removeprefix("hf:")), device_named(device)
    if not (folder / "config.json").is_file():
        known = [zoo.PREFIX + name for name in zoo.names()]
        raise FileNotFoundError(
            f"{str(source)!r} is neither a run folder nor an export: there is no "
            f"{folder / 'config.json'}{suggestion(str(source), known)}"
        )
    if not is_export(folder):
        return of_run(load_run(folder, checkpoint, device=where))
    if checkpoint is not None:
        raise ValueError(f"checkpoint = {checkpoint}: an export holds a single one; leave it out")
    model, tokenizer = read_export(folder).to(where).eval(), read_tokenizer(folder)
    return TextModel(folder.name, model, tokenizer, as_written(tokenizer))


def of_run(run: Run) -> TextModel:
    name = f"{zoo.PREFIX if zoo.is_inside(run.folder) else ''}{run.folder.name}"
    return TextModel(name, run.model, run.tokenizer, run)
