"""What the README and the pages of docs/ show works: snippets are run, commands are parsed, and
those that are quick are run in small."""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from nrgpt import zoo
from nrgpt.cli import app
from nrgpt.model.energy import ENERGIES
from nrgpt.model.registry import PLUGINS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
SMALL = [
    "iterations=4",
    "optimiser.warmup=1",
    "batch=4",
    "eval_batches=1",
    "eval_every=4",
    "save_every=4",
]


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCED.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """The arguments of every `nrgpt ...` line."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    split = [shlex.split(line, comments=True) for line in lines if re.match(r"(\$ )?nrgpt ", line)]
    return [words[words.index("nrgpt") + 1 :] for words in split]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page):
    """Every name and option, and that nothing is missing. Nothing is run."""
    group = typer.main.get_command(app)
    for words in commands(page):
        if "|" in words or "..." in words:  # a synopsis
            continue
        while "--plugin" in words:
            at = words.index("--plugin")
            words = words[:at] + words[at + 2 :]
        command: click.Command = group
        while isinstance(command, click.Group):
            name, *words = words
            assert name in command.commands, name
            command = command.commands[name]
        command.make_context(command.name, list(words))


def test_snippets_of_the_readme_run():
    """Each goes on where the one before has ended."""
    about: dict[str, object] = {}
    for block in blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), about)


def test_snippets_of_the_landscape_run():
    """With a model of the zoo, and few iterations."""
    folder = zoo.folder("shakespeare_certified")
    about: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / "landscape.md", "python"):
        small = re.sub(r"=\d_000", "=9", block).replace("random_points(200)", "random_points(6)")
        small = small.replace("images=33", "images=4").replace("count=81", "count=5")
        small = small.replace("runs/certified", str(folder)).replace("index=1,", "iterations=2,")
        exec(compile(small, "landscape.md", "exec"), about)


def run(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_energy_of_the_tour(tmp_path, monkeypatch):
    """As the tour has it: trained from the command line, with a plugin that must be named."""
    (source,) = blocks(ROOT / "docs" / "tour.md", "python")
    (tmp_path / "bowl.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    plain = ["train", "debug", 'model.terms=("attention","feedforward","bowl")', *SMALL]
    refused = CliRunner().invoke(app, [*plain, "--to", "runs/bowl"])
    assert refused.exit_code == 2
    assert not Path("runs").exists()
    try:
        for words in commands(ROOT / "docs" / "tour.md"):
            run(*words, *(SMALL if "train" in words else []))
        del PLUGINS[:], ENERGIES["bowl"]
        forgotten = CliRunner().invoke(app, ["sample", "runs/bowl"])
        assert forgotten.exit_code == 2
        assert "--plugin bowl" in forgotten.stderr
    finally:
        PLUGINS.clear()
        ENERGIES.pop("bowl", None)
        sys.modules.pop("bowl", None)


def test_a_newcomers_commands():
    """The first commands of the README, one after the other."""
    run("zoo")
    run("presets")
    run("sample", "zoo:shakespeare_certified", "--prompt", "ROMEO:", "--tokens", "3")
    run("train", "debug", *SMALL, "--to", "runs/first")
    for words in (["evaluate"], ["certificate"], ["sample", "--prompt", "max(1,2) ="]):
        run(words[0], "runs/first", *words[1:])
