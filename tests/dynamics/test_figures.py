"""Figures, page and command: written, readable, and safe with any text."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import nrgpt
from nrgpt.cli import app
from nrgpt.data.tokenizer import SymbolTokenizer
from nrgpt.dynamics import figures
from nrgpt.dynamics.page import record_of, write_page
from nrgpt.dynamics.regularise import Toward
from nrgpt.model.network import IGNORED_TARGET

from ..models import config, randomised, tokens

HOSTILE = ["</script><b>", "<!--", "$x_{", "\n", " a", "\u2028", "\ud800", "🙂", "&lt;", '"', "\\"]
"""A text for each of the 11 tokens."""


def watched(batch=2, length=7, steps=5, *, energies=True, **fields):
    cfg = config(**fields)
    idx, targets = tokens(cfg, batch, length)
    targets = targets.clone()
    targets[:, -1] = IGNORED_TARGET
    return nrgpt.trajectory(
        randomised(cfg), idx, targets, steps, energies=energies, top=min(4, cfg.vocab_size)
    )


def is_drawn(path):
    """Not blank: a picture of some size with many colours."""
    from matplotlib.image import imread

    picture = imread(path)
    shades = np.unique(picture[..., :3].sum(-1).round(2))
    return min(picture.shape[:2]) > 100 and len(shades) > 20


def test_figures_are_written_as_png_and_pdf(tmp_path):
    files = figures.write_figures(watched(), tmp_path / "new" / "folder", HOSTILE.__getitem__)
    names = {"energies", "heatmap", "readout"}
    assert {file.name for file in files} == {f"{n}.{end}" for n in names for end in ("png", "pdf")}
    for file in files:
        if file.suffix == ".png":
            assert is_drawn(file)
        else:
            assert file.read_bytes().startswith(b"%PDF")


def test_every_panel_has_all_its_curves():
    seen = watched()
    axes = figures.energy_figure(seen, sample=1).axes
    assert len(axes) == 5  # and the scale of positions
    for axis, values in zip(axes, [*seen.energies.values(), seen.size], strict=False):
        (lines,) = axis.collections
        segments = np.stack(lines.get_segments())  # tokens, states, (t, value)
        assert np.array_equal(segments[..., 0], np.broadcast_to(np.arange(6), (7, 6)))
        assert np.allclose(segments[..., 1], values[:, 1].T.numpy())
        assert axis.lines[1].get_xdata()[0] == seen.trained_steps


def test_any_number_of_terms_is_shown(tmp_path):
    """Figures and page take the names of terms from the trajectory."""
    model, idx = randomised(config()), torch.randint(11, (1, 7))
    extra = {"cost of $5": Toward(torch.ones(9, dtype=torch.float64), 1.0)}
    seen = nrgpt.trajectory(model, idx, extra=extra)
    names = ["energy", "attention energy", "feedforward energy", "cost of $5 energy"]
    titles = [axis.get_title().replace(r"\$", "$") for axis in figures.energy_figure(seen).axes]
    assert titles[:4] == names
    figures.save(figures.heatmap_figure(seen, term="cost of $5"), tmp_path / "heatmap", ("png",))
    assert list(record_of(seen)["curves"])[:4] == names


def test_the_heat_map_holds_the_changes():
    seen = watched()
    axis = figures.heatmap_figure(seen, term="attention", sample=1).axes[0]
    expected = seen.energies["attention"][:, 1].diff(dim=0).numpy()
    assert np.allclose(axis.collections[0].get_array(), expected)
    with pytest.raises(ValueError, match="term = 'atention': the energies of this trajectory are"):
        figures.heatmap_figure(seen, term="atention")


def test_readouts_are_written_into_their_cells(monkeypatch):
    seen = watched()
    monkeypatch.setattr(figures, "BAND", 4)  # two bands, the second one shorter
    axes = figures.readout_figure(seen, lambda n: f"t{n}", sample=1).axes
    for axis, part in zip(axes, (slice(0, 4), slice(4, 7)), strict=False):
        for text in axis.texts:
            column, row = text.get_position()
            assert text.get_text() == f"t{seen.argmax[row, 1, part][column]}"
        assert len(axis.texts) == 6 * (part.stop - part.start)
        read = [label.get_text() for label in axis.get_xticklabels()]
        assert read == [f"t{n}" for n in seen.idx[1, part]]
    assert not all(text.get_parse_math() for text in axes[0].texts)


def test_of_many_states_some_are_shown_the_trained_one_among_them():
    seen = watched(steps=90)
    shown = figures.shown_states(seen)
    assert {0, 3, 90} <= set(shown)
    assert len(shown) <= figures.ROWS + 1


@pytest.mark.parametrize("energies", [True, False])
def test_the_smallest_trajectory_and_one_without_energies(tmp_path, energies):
    cfg = config(block="nrgpt" if energies else "rgpt", steps=1)
    idx = torch.zeros(1, 1, dtype=torch.long)
    seen = nrgpt.trajectory(randomised(cfg), idx, energies=energies)
    files = figures.write_figures(seen, tmp_path)
    assert len(files) == (6 if energies else 4)
    write_page(seen, tmp_path / "index.html")
    if not energies:
        with pytest.raises(ValueError, match="made with energies=False"):
            figures.heatmap_figure(seen)


def test_a_trajectory_draws_itself(tmp_path):
    seen = watched()
    assert repr(seen).startswith("Trajectory(5 steps of 2 x 7 tokens, mean energy ")
    assert "mean loss" in repr(seen)
    for what in ("energies", "heatmap", "readout"):
        assert seen.plot(what, sample=1, tokens=4).axes
    with pytest.raises(ValueError, match="what = 'energy': must be one of"):
        seen.plot("energy")
    path = seen.page(tmp_path / "new" / "x.html", label=HOSTILE.__getitem__)
    assert path.stat().st_size > 10_000
    step = next(nrgpt.stream_trajectory(randomised(config()), torch.zeros(1, 3, dtype=torch.long)))
    assert repr(step).startswith("Step(energies: {total: 1 x 3, ")


def test_tokens_are_made_visible():
    assert figures.visible(" a") == "␣a"
    assert figures.visible("\n\t") == "↵⇥"
    assert figures.visible("\x00b") == "\ufffdb"
    assert figures.visible("extraordinary") == "extraor…"
    label = figures.token_label(SymbolTokenizer(["a", "b"]))
    assert [label(1), label(2)] == ["b", "#2"]


def test_without_matplotlib_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    seen = watched()
    for draw in (figures.energy_figure, figures.heatmap_figure, figures.readout_figure):
        with pytest.raises(ValueError, match=re.escape("pip install 'nrgpt[plot]'")):
            draw(seen)


class Page(HTMLParser):
    """The tags and the content of each script, as a browser would find them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.attributes = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data


def test_the_page_is_whole_whatever_the_texts(tmp_path):
    seen = watched()
    pages = {}
    for name, label in {"plain": str, "hostile": HOSTILE.__getitem__}.items():
        path = tmp_path / f"{name}.html"
        write_page(seen, path, label, title="</script><b> DATA", sample=1)
        pages[name] = Page(path.read_text(encoding="utf-8"))
    assert pages["hostile"].tags == pages["plain"].tags
    assert pages["hostile"].tags.count("script") == 2
    assert "b" not in pages["hostile"].tags
    assert "src" not in pages["plain"].attributes  # nothing from elsewhere
    (data,) = json.loads(pages["hostile"].scripts[0])["models"]
    assert data["name"] == "</script><b> DATA"
    assert data["texts"] == {n: HOSTILE[int(n)] for n in data["texts"]}
    record = data["recorded"]
    assert record["tokens"] == seen.idx[1].tolist()
    assert record["targets"] == [*seen.targets[1, :-1].tolist(), None]
    energy = torch.tensor(record["curves"]["energy"], dtype=torch.float64)
    assert torch.allclose(energy, seen.energies["total"][:, 1], rtol=1e-5)
    assert record["curves"]["movement"][0] == [None] * 7
    assert record["curves"]["loss"][0][-1] is None
    assert record["said"] == seen.top_tokens[:, 1].tolist()


def test_without_matplotlib_the_command_still_writes_its_page(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["trajectory", "zoo:listops_30_steps", "--text", "max(4,2) =", "--to", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "pip install 'nrgpt[plot]'" in result.output.replace("\n", " ")
    assert (tmp_path / "index.html").stat().st_size > 10_000
    assert not (tmp_path / "energies.png").exists()


QUICK = ["iterations=6", "eval_every=6", "eval_batches=1", "data.listops.test=5"]


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NRGPT_DATA", raising=False)

    def command(*arguments, code=0):
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == code, result.output
        return result.output

    command("train", "debug", "--to", "mine", *QUICK)
    said = command("trajectory", "mine", "--steps", "9", "--text", "sum(1,2)", "--device", "cpu")
    assert "5 tokens over 9 steps" in said.replace("\n", " ")
    for name in ("energies.png", "energies.pdf", "heatmap.png", "readout.png", "index.html"):
        assert f"mine/trajectory/{name}" in said
        assert (tmp_path / "mine" / "trajectory" / name).stat().st_size > 1000
    with np.load("mine/trajectory/trajectory.npz") as arrays:
        assert arrays["energy_total"].shape[:2] == (10, 1)
    assert "split = 'vall'" in command("trajectory", "mine", "--split", "vall", code=2)
    assert "steps = 0" in command("trajectory", "mine", "--steps", "0", code=2)
    assert "nowhere is not a run" in command("trajectory", "nowhere", code=2)
