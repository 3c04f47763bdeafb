"""`nrgpt --help`, without loading what the commands need: their names and first lines. A test
compares it with the help of the commands themselves."""

import typer

from .. import __version__

ABOUT = (
    "Energy-based GPTs: train them, watch them, use them. To use your own energies, give any "
    "command [bold]--plugin MODULE[/bold], the module that registers them."
)
COMMANDS = {
    "train": (
        "Train a preset, or on a text of your own. If it was stopped, the same command continues."
    ),
    "sweep": (
        "Train a preset many times: all combinations of comma-separated values, or a search."
    ),
    "presets": ("List the presets: width D, heads H, steps T and updates. Or all fields of one."),
    "fields": ("Explain the fields of a configuration, or those whose names begin with NAME."),
    "sample": ("Let a trained model continue a text, printed token by token."),
    "zoo": ("List the trained models that come with the package."),
    "bench": ("Measure speed and memory on this machine, with everything compared in one run."),
    "explore": ("Type a text and watch its tokens roll downhill, live, in a browser."),
    "landscape": ("The landscape of one token: its minima, the pass between two of them, a map."),
    "trajectory": (
        "Watch tokens on their energy landscapes: figures, numbers and an interactive page."
    ),
    "certificate": (
        "Is descent guaranteed? If not, which part prevents it, and what happens on real text?"
    ),
    "adaptive": ("Stop each token early by a rule: what does that cost, and what does it save?"),
    "convergence": (
        "When do tokens come to rest, and do they return when pushed? Ctrl-C: use the steps so far."
    ),
    "evaluate": (
        "Loss on every token of a split, ListOps accuracy, text metrics, tasks of lm-eval."
    ),
    "verify": ("Check every file of a run or an export: is it as it was written?"),
    "serve": (
        "Serve a model over HTTP, as OpenAI's completions: /v1/completions, /v1/models, /health."
    ),
    "chat": ("Write with a model, in turns: it continues what you have both written so far."),
    "export": ("Write a run as a Hugging Face model: weights, tokenizer, model card and code."),
    "push": ("Export a run and upload it to the Hugging Face Hub."),
    "reproduce": (
        "Train the missing runs and make the paper's figures and tables. Stop it at any time; the "
        "same command continues."
    ),
    "data": ("Prepare and check datasets."),
}


def outline(arguments: list[str]) -> None:
    app = typer.Typer(
        help=ABOUT, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(with_version)
    for name, line in COMMANDS.items():
        app.command(name, help=line)(lambda: None)
    app(arguments, prog_name="nrgpt")


def show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"nrgpt {__version__}")
        raise typer.Exit


def with_version(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=show_version, is_eager=True
    ),
) -> None:
    """The options of nrgpt itself."""
