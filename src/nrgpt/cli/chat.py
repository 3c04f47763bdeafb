"""Writing with a model in turns, in the terminal."""

import queue
import sys
from typing import Any

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from ..check import check
from ..decode.generate import Sampling
from ..serve.engine import Engine, Event, Failed, Finished, Job, Token, Way
from ..text_model import TextModel

HELP = "/energies switches numbers on and off, /new begins another text, Ctrl-D ends"


class Chat:
    """``text`` is what both have written. The model continues it, and shows each token's energy."""

    def __init__(self, model: TextModel, energies: bool, options: dict[str, Any]):
        self.model, self.energies, self.options = model, energies, options
        check(options["tokens"] >= 1, "--tokens", options["tokens"], "at least 1")
        self.job([0], queue.Queue())  # whatever is wrong is said now, and not after a line
        self.numbers = False
        self.text = ""
        self.range: list[float] = []
        """The lowest and the highest energy of the text so far."""
        self.screen = Console(highlight=False)
        self.engine = Engine(model.model, rows=1).start()

    def talk(self) -> None:
        is_shown = sys.stdin.isatty()
        if is_shown:
            self.screen.print(f"{self.model!r}\n{HELP}", style="dim", markup=False)
        try:
            while True:
                try:
                    line = input("> " if is_shown else "")
                except EOFError:
                    return
                self.obey(line)
        finally:
            self.engine.stop()

    def obey(self, line: str) -> None:
        if line.strip() == "/new":
            self.text, self.range = "", []
        elif line.strip() == "/energies":
            self.numbers = not self.numbers
        elif line.startswith("/"):
            self.screen.print(HELP, style="dim", markup=False)
        else:
            try:
                self.answer(line)
            except ValueError as error:
                self.screen.print(f"nrgpt: {error}", style="red", markup=False)

    def answer(self, line: str) -> None:
        is_expression = self.model.tokenizer.kind == "symbols"  # ListOps: a new one each time
        text = line if is_expression else f"{self.text}{line}\n" if line else self.text
        prompt = self.model.encode(text)[-self.model.model.cfg.context :]
        events: queue.Queue[Event] = queue.Queue()
        job = self.job(prompt, events)
        self.engine.submit([job])
        before, said, echoed = self.model.decode(prompt), "", len(prompt) if job.echo else 0
        tokens = list(prompt)
        try:
            while not isinstance(event := events.get(timeout=600), Finished):
                if isinstance(event, Failed):
                    raise ValueError(event.message)
                energy = None if event.energies is None else event.energies["total"]
                self.widen(energy)
                if echoed:
                    echoed -= 1
                    continue
                tokens.append(event.number)
                whole = self.model.decode(tokens)[len(before) :].rstrip("\ufffd")
                self.show(whole[len(said) :], event, energy)
                said = whole
        except KeyboardInterrupt:
            self.engine.cancel([job])
        self.screen.print()
        self.text = "" if is_expression else text + said + ("" if said.endswith("\n") else "\n")

    def job(self, prompt: list[int], events: "queue.Queue[Event]") -> Job:
        options, end = self.options, self.model.tokenizer.end_of_text
        steps = self.model.model.check_steps(options["steps"])
        heat = 0.0 if self.model.tokenizer.kind == "symbols" else options["temperature"]
        return Job(
            text=list(prompt),
            most=options["tokens"],
            way=Way(steps, energies=self.energies),
            sampling=Sampling(temperature=heat, top_p=options["top_p"]),
            send=events.put,
            seed=options["seed"],
            ends=frozenset() if end is None else frozenset({end}),
            echo=self.energies,
        )

    def widen(self, energy: float | None) -> None:
        if energy is not None:
            self.range = [min([energy, *self.range]), max([energy, *self.range])]

    def show(self, piece: str, token: Token, energy: float | None) -> None:
        if energy is None:
            self.screen.print(piece, end="", markup=False, soft_wrap=True)
            return
        low, high = self.range
        share = (energy - low) / (high - low) if high > low else 0.5
        style = Style(color=Color.from_rgb(80 + 175 * share, 140 - 60 * share, 255 - 175 * share))
        shown = Text(piece, style)
        if self.numbers:
            shown.append(f"({energy:.2f})", Style(dim=True))
        self.screen.print(shown, end="", soft_wrap=True)
