"""What the README and the pages of docs/ show works: snippets are run, commands are parsed, and
those that are quick are run in small."""

import re
import runpy
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from nrgpt import zoo
from nrgpt.cli import app
from nrgpt.model.energy import ENERGIES
from nrgpt.model.registry import PLUGINS
from nrgpt.train.overrides import known_names
from nrgpt.train.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
MADE = {"commands.md", "configuration.md", "explorer-page.html"}
"""By dev/docs/build.py, for the site."""
sys.path.insert(0, str(ROOT / "dev" / "docs"))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        assert Path(target).name in MADE or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_understood(page):
    """Every name and option, and that nothing is missing. Nothing is run."""
    group = typer.main.get_command(app)
    for words in commands(page):
        if "|" in words or "..." in words:  # a synopsis
            continue
        while "--plugin" in words:
            at = words.index("--plugin")
            words = words[:at] + words[at + 2 :]
        command = group
        while hasattr(command, "commands"):  # Typer has a click of its own
            name, *words = words
            assert name in command.commands, name
            command = command.commands[name]
        command.make_context(command.name, list(words))


@pytest.mark.parametrize("page", ["README.md", "docs/engineers.md"])
def test_snippets_run(page):
    """Each goes on where the one before has ended."""
    about: dict[str, object] = {}
    for block in blocks(ROOT / page, "python"):
        exec(compile(block, page, "exec"), about)


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


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_run(page, tmp_path):
    """As they are run when the site is built, but in small."""
    from tutorials import executed

    before = dict(ENERGIES)
    try:
        text, pictures = executed(page, tmp_path / "work", quick=True)
    finally:
        for name in ENERGIES.keys() - before:
            del ENERGIES[name]
    assert text.count(".output }") >= 4
    assert all(picture.startswith(b"<?xml") for picture in pictures.values())
    assert all(f"({name})" in text for name in pictures)
    assert ("{ .wide }" in text) == (page.stem != "hugging-face")  # energies: four panels or five


def test_the_reference_has_every_command_and_every_field():
    from reference import commands_page, configuration_page

    page = commands_page()
    for name in typer.main.get_command(app).commands:
        assert f"## nrgpt {name}" in page
    assert "| `--to` |  | Run folder; default in runs/. |" in page
    assert "On your own text:\n\n```\nnrgpt train --text my.txt\n```" in page
    fields = configuration_page()
    for name in known_names(PRESETS["debug"]()):
        assert f"| `{name}` |" in fields, name
    assert "T: inference steps of a recurrent block" in fields


def test_broken_links_are_found(tmp_path):
    from build import broken_links

    (tmp_path / "a.html").write_text('<p id="x"></p><a href="b.html#y">b</a><a href="#x">x</a>')
    (tmp_path / "b.html").write_text(
        '<a href="a.html#z">a</a><img src="none.png"><a href="/a.html">'
    )
    assert broken_links(tmp_path) == ["a.html: b.html#y", "b.html: a.html#z", "b.html: none.png"]


def test_every_formula_can_be_drawn():
    pytest.importorskip("latex2mathml", reason="pip install 'nrgpt[docs]'")
    from hooks import FORMULA, on_page_content

    inline = on_page_content(r'a <span class="arithmatex">\(x \in \mathbb R^D\)</span>')
    assert "<math" in inline
    assert not FORMULA.search(inline)
    for page in PAGES:
        for formula in re.findall(r"\$\$(.+?)\$\$", FENCED.sub("", page.read_text()), re.DOTALL):
            drawn = on_page_content(f'<div class="arithmatex">\\[{formula}\\]</div>')
            assert 'display="block"' in drawn


def test_pictures_are_plain_svg():
    """GitHub shows them as images: no script, nothing from elsewhere."""
    for path in (ROOT / "docs").glob("*.svg"):
        tags = {element.tag.split("}")[1] for element in ElementTree.parse(path).iter()}
        assert tags <= {"svg", "style", "path", "rect", "text", "tspan"}
    drawn = runpy.run_path(str(ROOT / "dev" / "draw_block.py"))["draw"]()
    assert (ROOT / "docs" / "block.svg").read_text(encoding="utf-8") == drawn


def test_the_moving_picture_is_that_of_a_certified_model():
    picture = (ROOT / "docs" / "descent.svg").read_text()
    assert len(picture) < 2_000_000
    assert "proved: no step raises an energy" in picture
    assert re.search(r"here 0 of \d+ steps raise one", picture)


def test_a_newcomers_commands():
    """The first commands of the README, one after the other."""
    run("zoo")
    run("presets")
    run("sample", "zoo:shakespeare_certified", "--prompt", "ROMEO:", "--tokens", "3")
    run("train", "debug", *SMALL, "--to", "runs/first")
    for words in (["evaluate"], ["certificate"], ["sample", "--prompt", "max(1,2) ="]):
        run(words[0], "runs/first", *words[1:])
