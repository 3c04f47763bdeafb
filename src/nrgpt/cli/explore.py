"""nrgpt explore, landscape."""

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Argument, Option

from .. import zoo
from ..dynamics.answers import Answers
from ..dynamics.figures import save, token_label
from ..dynamics.page import write_page
from ..dynamics.plots import path_figure, slice_figure
from ..dynamics.survey import Survey, survey
from ..dynamics.trajectory import trajectory
from ..explore.models import about, certificates, for_page
from ..explore.page import page, refuse_other_pages
from ..explore.server import Server, new_key
from ..explore.weights import NotForThePage
from ..extras import MissingExtra
from ..files import write_atomically
from ..train.runs import Run, load_run
from .common import (
    Seed,
    Steps,
    app,
    file_to_write,
    folder_for_results,
    folder_to_write,
    in_float64,
    open_run,
    screen,
    table_of,
    with_options_of,
)

EXAMPLES = {
    "listops": ("max(4,median(1,5,3),2) =", "sum(7,8,median(1,2,9)) =", "min(7,max(2,9),4) ="),
    "shakespeare": (
        "To be, or not to be, that is the question",
        "ROMEO:\nO, she doth teach the torches to burn bright!",
    ),
}
GENERAL = ("The quick brown fox jumps over the lazy dog",)
Text = Annotated[str | None, Option(help="Text to begin with.")]


@app.command()
def explore(
    runs: Annotated[
        list[Path] | None,
        Argument(
            help="Run folders or zoo:NAME; default: all models of the zoo.", metavar="[RUN]..."
        ),
    ] = None,
    to: Annotated[
        Path | None, Option(help="Write one self-contained HTML file instead of serving the page.")
    ] = None,
    text: Text = None,
    port: Annotated[
        int, Option(min=0, max=65_535, help="Port on 127.0.0.1; 0 is any free one.")
    ] = 0,
    browser: Annotated[bool, Option(help="Open the page in a browser.")] = True,
) -> None:
    """Type a text and watch its tokens roll downhill, live, in a browser.

    nrgpt explore zoo:shakespeare_certified --to explorer.html    # works offline, on a phone too

    nrgpt explore runs/a runs/b    # side by side: press "Compare two" in the page

    The model runs inside the page. One that is too large for that is computed by a server on this
    machine that listens on 127.0.0.1 only; such a model cannot go into a file.
    """
    if runs:
        loaded = [load_run(zoo.resolve(run)) for run in runs]
    else:  # those whose energies provably fall come first
        loaded = [load_run(zoo.folder(name)) for name in zoo.names()]
        loaded.sort(key=lambda run: not run.model.guarantees())
    names = distinct_names(loaded)
    if to is not None:
        if to.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--to {to}: must be an .html file")
        refuse_other_pages(to)
        try:
            models = [for_page(run.model, run.tokenizer, **told(run, names[run.folder], text))
                      for run in loaded]  # fmt: skip
        except NotForThePage as error:
            raise ValueError(f"{error}; leave out --to, and Python computes it") from error
        file_to_write(to)
        write_atomically(to, page(models))
        screen.print(f"{to}: open it in any browser; it needs nothing else", soft_wrap=True)
        return
    try:
        server = server_of(loaded, names, text, port)
    except OSError as error:
        raise ValueError(f"--port {port}: {error.strerror}; choose another, or 0") from error
    screen.print(f"{server.address}\nCtrl-C ends it", soft_wrap=True, highlight=False)
    if browser:
        webbrowser.open(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        screen.print("ended")
    finally:
        server.server_close()


def server_of(loaded: list[Run], names: dict[Path, str], text: str | None, port: int) -> Server:
    """Models that fit into the page, and answers about the others."""
    key, models, asked = new_key(), [], {}
    for run in loaded:
        name = names[run.folder]
        try:
            models.append(for_page(run.model, run.tokenizer, **told(run, name, text)))
        except NotForThePage as why:
            screen.print(f"{name} is computed by Python: {why}", soft_wrap=True)
            models.append(
                about(run.model, run.tokenizer, **told(run, name, text))
                | {"key": key, "symbols": None, "settled": True}
            )
            asked[name] = Answers(run.model, run.tokenizer, run.encode)

    def ask(what: str, question: dict[str, Any]) -> dict[str, Any]:
        if question.get("model") not in asked:
            raise ValueError(f"model = {question.get('model')!r}: it is not here")
        return dict(asked[question["model"]].by_name()[what](question))

    answers = {what: lambda q, what=what: ask(what, q) for what in Answers.QUESTIONS}
    return Server(page(models, connect="'self'" if asked else "'none'"), answers, key, port)


def told(run: Run, name: str, text: str | None) -> dict[str, Any]:
    """What the page is told of a run. Examples are those that it can read."""
    known = [example for example in EXAMPLES.get(run.cfg.data.task, GENERAL) if reads(run, example)]
    examples = [*([text] if text else []), *known] or [run.decode([0])]
    what = zoo.about(run.folder.name)["what"] if zoo.is_inside(run.folder) else ""
    is_listops = run.cfg.data.task == "listops"
    return {"name": name, "what": what, "expressions": is_listops, "examples": examples}


def reads(run: Run, text: str) -> bool:
    try:
        return bool(run.encode(text))
    except ValueError:
        return False


def distinct_names(loaded: list[Run]) -> dict[Path, str]:
    """Folders by name, longer where that is ambiguous."""
    short = [run.folder.name for run in loaded]
    return {
        run.folder: name if short.count(name) == 1 else str(run.folder)
        for run, name in zip(loaded, short, strict=True)
    }


@app.command()
@with_options_of(open_run)
def landscape(
    loaded: Run,
    text: Annotated[str | None, Option(help="Text; default one that fits the model.")] = None,
    token: Annotated[
        int | None, Option(help="Which token of the text, from 1; default the last.")
    ] = None,
    starts: Annotated[int, Option(help="Random places to roll down from.")] = 16,
    steps: Steps = None,
    seed: Seed = 0,
    to: Annotated[Path | None, Option(help="Folder; default RUN/landscape.")] = None,
) -> None:
    """The landscape of one token: its minima, the pass between two of them, a map.

    Where would the token end if it went on rolling, where would it end from elsewhere, and what
    would the model say there? Earlier tokens stand still at their last states.

    nrgpt landscape zoo:shakespeare_certified --text 'To be, or not' --token 5
    """
    text = told(loaded, "", None)["examples"][0] if text is None else text
    tokens, model = loaded.encode(text), in_float64(loaded.model)
    _ = model.energy_block  # raises for a baseline
    if not tokens:
        raise ValueError(f"--text {text!r}: there is no token in it")
    number = len(tokens) if token is None else token
    if not 1 <= number <= len(tokens):
        raise ValueError(f"--token {number}: must be in 1 .. {len(tokens)}, the tokens of the text")
    idx = torch.tensor([tokens], device=model.tokens.device)
    model.check_tokens(idx)
    folder = folder_to_write(to or folder_for_results(loaded.folder) / "landscape")
    refuse_other_pages(folder / "index.html")
    with screen.status("rolling down from many places ..."):
        found = survey(model, idx, number - 1, steps=steps, starts=starts, seed=seed)
    label = token_label(loaded.tokenizer)
    name = label(tokens[number - 1])
    table = table_of(f"token {number}, {name!r}", "where", "energy", "starts", "it would say")
    for row in found.rows(label):
        table.add_row(*row)
    screen.print(table)
    if found.saddle_energy is not None and found.curvatures is not None:
        curved = ", ".join(f"{float(c):.3g}" for c in found.curvatures)
        screen.print(f"pass at {found.saddle_energy:.4g}, lowest curvatures {curved}")
    seen = trajectory(model, idx, steps=steps, top=min(5, model.cfg.vocab_size))
    title = f"{loaded.folder.name}, token {number}"
    more: dict[str, Any] = {"landscape": found.record(), "certificates": certificates(model)}
    write_page(seen, folder / "index.html", label, title=title, tokens=len(tokens), **more)
    for file in [*draw(found, folder), folder / "index.html"]:
        screen.print(str(file), soft_wrap=True)


def draw(found: Survey, folder: Path) -> list[Path]:
    """The maps, and the way over the pass, as PNG and PDF; nothing without matplotlib."""
    way, minima, sections = found.way, found.found.minima, found.sections
    names = [f"minimum {i + 1}" for i in found.shown]
    across = f"towards {names[0]} →"
    try:
        directions = (across, "towards its start →")
        figure = slice_figure(
            sections["path"], way, minima[[found.below]], names=names, directions=directions
        )
        files = save(figure, folder / "map")
    except MissingExtra as error:
        screen.print(f"no PNG and PDF: {error}", soft_wrap=True, markup=False)
        return []
    if found.between is not None:
        directions = (across, f"towards {names[1]} →")
        figure = slice_figure(
            sections["minima"], way, minima[found.shown], found.saddle,
            names=names, directions=directions,
        )  # fmt: skip
        files += save(figure, folder / "minima")
        files += save(path_figure(found.between, (names[0], names[1])), folder / "path")
    return files
