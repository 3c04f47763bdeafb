"""nrgpt reproduce shakespeare and text: their sizes, end to end, and the texts they keep."""

import shutil
import string
from collections import Counter
from pathlib import Path

import pytest
import torch

from nrgpt import LanguageModel
from nrgpt.data.shakespeare import prepare_shakespeare
from nrgpt.evaluate.mmlu import csv_file
from nrgpt.extras import MissingExtra
from nrgpt.reproduce import common, shakespeare, text, texts
from nrgpt.reproduce.records import Record, put
from tests.cases import TINY
from tests.characters import TEXT, character_run
from tests.questions import write_questions


def test_shakespeare_has_the_papers_sizes():
    paper, ours = shakespeare.cases("paper"), shakespeare.cases("ours")
    parts = Counter(case.labels["part"] for case in paper)
    varied = 3 * (4 * 10 + 8)  # widths; a GPT's layers stay
    assert parts == {
        "scaling": 7 * 5 * 4 * 3, "long": 5 * 3, "table": 5 * 3, "sensitivity": varied * 3,
    }  # fmt: skip
    assert len({case.name for case in paper}) == len(paper)
    assert {case.cfg.iterations for case in paper} == {40_000}
    for case in ours:
        part = case.labels["part"]
        if part.startswith("ours"):
            count = LanguageModel(case.cfg.model).parameter_counts().total
            assert 0.7 < count / {"ours_small": 250_000, "ours_wide": 1_000_000}[part] <= 1


@pytest.fixture
def characters(tmp_path):
    """A small dataset with as many characters as Shakespeare's, and those of questions."""
    possible = string.digits + '"+:()' + string.ascii_letters
    others = [c for c in possible if c not in TEXT][: 65 - len(set(TEXT))]
    (tmp_path / "text.txt").write_text("".join(others) + TEXT)
    prepare_shakespeare(tmp_path / "data", source=tmp_path / "text.txt")
    return tmp_path / "data"


def test_shakespeare_end_to_end(tmp_path, characters):
    data = f"data.folder={characters}"
    cases = shakespeare.cases("ours", seeds=1, quick=True)
    wanted = ("scaling-ours-nrgpt_ff2w", "long-ours-gpt", "ours_small-ours-nrgpt_certified")
    cases = [case for case in cases if case.name.startswith(wanted)]
    cases = [case.changed((*TINY, data)) for case in cases]
    assert len(cases) == 4
    files = shakespeare.reproduce(cases, tmp_path / "to", judge=None, quick=True)
    assert [file.name for file in files] == [
        "scaling-ours.png", "scaling-ours.md", "overfitting-ours.png", "long-ours.md",
        "ours_small-ours.md",
    ]  # fmt: skip
    said = files[-1].read_text()
    assert "| NRGPT, certified | 32 | 4 | 3 |" in said
    assert "Distinct-1" in said
    assert "Not measured here: perplexity, cosine_similarity" in said
    assert "| people |" in said
    assert common.read_rows(tmp_path / "to")[-1]["certificate"] is True
    again = shakespeare.reproduce([], tmp_path / "to", plots_only=True, quick=True)
    assert again == files


def test_text_metrics_without_their_packages(tmp_path, monkeypatch, capsys):
    """What is missing is said, and the rest is measured."""
    from nrgpt.evaluate import grammar

    def missing(module, what_for):
        raise MissingExtra(f"{what_for} needs {module}")

    monkeypatch.setattr(grammar, "need", missing)
    grammar.dictionary.cache_clear()
    run = character_run(tmp_path / "characters", iterations=10)
    record = Record({})
    assert len(texts.keep_texts(run, record, samples=2, words=5)) == 2
    (tmp_path / "to").mkdir()
    put(tmp_path / "to", {"one": record})
    common.put_rows(tmp_path / "to", [{"case": "one"}, {"case": "without texts"}])
    rows = texts.with_metrics(common.read_rows(tmp_path / "to"), tmp_path / "to", None, quick=True)
    assert set(rows[0]["metrics"]["model"]) == {"distinct_1", "distinct_2"}
    assert "left out: the spelling of texts needs" in capsys.readouterr().out
    assert texts.columns(rows[:1]) == ["distinct_1", "distinct_2"]

    # Elsewhere, where there is what was missing, the same texts get the rest.
    monkeypatch.undo()
    grammar.dictionary.cache_clear()
    measures = {"perplexity": lambda text: 7.0, "cosine_similarity": lambda text: 0.5}
    monkeypatch.setattr(texts, "measures_here", lambda *_: measures)
    full = texts.with_metrics(rows, tmp_path / "to", "some/judge")
    assert full == common.read_rows(tmp_path / "to")
    assert texts.columns(full[:1]) == list(texts.METRICS)
    assert texts.heading("perplexity", full) == "perplexity, by judge"
    assert full[0]["metrics"]["people"]["perplexity"] == 7
    assert full[1] == {"case": "without texts"}
    assert texts.mean_of(full, "model", "perplexity") == "7"  # a row without texts is left out
    # Another judge measures all again; one that cannot be had takes nothing away.
    measures["perplexity"] = lambda text: 9.0
    (other, _) = texts.with_metrics(full, tmp_path / "to", "gpt2")
    assert other["metrics"]["model"]["perplexity"] == 9
    assert other["metrics_settings"]["judge"] == "gpt2"
    measures.clear()
    (kept, _) = texts.with_metrics(full, tmp_path / "to", "gpt2")
    assert kept == full[0]
    monkeypatch.setattr(texts, "measures_here", lambda *_: pytest.fail("measured again"))
    assert texts.with_metrics(full, tmp_path / "to", "some/judge") == full
    assert texts.with_metrics(full, tmp_path / "to", None) == full


def test_a_missing_model_costs_its_own_metric_only(monkeypatch, capsys):
    def missing(device):
        raise ValueError("no embedder here")

    loaders = {"cosine_similarity": missing, "perplexity": lambda device: lambda text: 7.0}
    monkeypatch.setattr(texts, "measures_to_load", lambda judge: loaders)
    assert set(texts.measures_here.__wrapped__("some/judge", "cpu")) == {"perplexity"}
    assert "left out: no embedder here" in capsys.readouterr().out


def test_text_has_the_papers_sizes():
    def counts(recipe):
        found = {}
        for case in text.cases(Path("data"), recipe, tokens=98_304_000):
            with torch.device("meta"):
                found[case.labels["model"]] = LanguageModel(case.cfg.model).parameter_counts()
            assert case.cfg.iterations * case.cfg.batch * case.cfg.model.context == 98_304_000
        return found

    paper = counts("paper")
    assert [round(count.tied / 1e6) for count in paper.values()] == [124, 47, 49, 52, 126, 128]
    assert [round(count.untied / 1e6) for count in paper.values()] == [163, 85, 88, 90, 213, 206]
    ours = [count.tied / 1e6 for count in counts("ours").values()]
    assert all(124 < ours[row] < 126 for row in (0, 4, 5))  # GPT, and two with as many


def test_text_end_to_end(tmp_path, characters, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = text.cases(characters, tokens=500, quick=True)
    assert len(cases) == 6
    # A seed that is not the first: figures name their lines all the same.
    cases = [case.changed([*TINY, "seed=1"]) for case in cases[:1] + cases[-1:]]
    for split, number in {"dev": 5, "test": 60}.items():
        write_questions(csv_file(tmp_path / "mmlu", split, "astronomy"), number)
    options = {"judge": None, "quick": True, "throughput": 1e6}
    text.reproduce(cases, tmp_path / "to", **options)
    assert "mmlu" not in common.read_rows(tmp_path / "to")[0]
    options |= {"held_out": characters, "mmlu": tmp_path / "mmlu"}  # what is asked for later
    shutil.rmtree(common.run_folder(tmp_path / "to", cases[1].name) / "checkpoints")
    files = text.reproduce(cases, tmp_path / "to", **options)
    assert "on record without held_out, mmlu, and" in capsys.readouterr().out
    assert "mmlu" not in common.read_rows(tmp_path / "to")[1]
    names = [
        "losses-ours.png", "table-ours.md", "samples-ours.md", "mmlu-ours.md", "full_run.md",
    ]  # fmt: skip
    assert [file.name for file in files] == names
    row = common.read_rows(tmp_path / "to")[0]
    assert row["held_out"]["loss"] == pytest.approx(row["val_loss_full"])
    assert len(row["texts"]) == 2
    assert row["mmlu"]["overall"]["total"] == 50
    table = files[1].read_text()
    assert "held out, whole split" in table
    assert f"{100 * row['mmlu']['overall']['accuracy']:.1f} ± " in table
    assert "| people |" in table
    assert "| GPT | NRGPT FF2W, as many parameters |" in files[2].read_text()
    assert "| GPT | 1 | " in files[3].read_text()
    assert "NRGPT (128M), paper |  | 35.5" in files[3].read_text()
    assert "| as given | 1,000,000 | 1.7 |" in files[4].read_text()  # 49.152e9 / 8e6 s
    again = {"plots_only": True, "throughput": 1e6, "quick": True}
    assert text.reproduce([], tmp_path / "to", **again) == files


def test_a_record_stays_with_its_data(tmp_path, characters, monkeypatch):
    """Which may lie elsewhere now, but must be the same."""
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "moved"

    def carry_out():
        cases = text.cases(moved, tokens=500, quick=True)[:1]
        return common.carry_out([case.changed(TINY) for case in cases], tmp_path / "to")

    shutil.copytree(characters, moved)
    (row,) = carry_out()
    moved = shutil.move(moved, tmp_path / "again")
    assert carry_out() == [row]
    shutil.rmtree(moved)
    (tmp_path / "other.txt").write_text((tmp_path / "text.txt").read_text() + TEXT)
    prepare_shakespeare(moved, source=tmp_path / "other.txt")
    with pytest.raises(ValueError, match="again is another dataset than it was trained on"):
        carry_out()


def test_what_is_held_out_is_looked_for_before_training(tmp_path, characters):
    cases = text.cases(characters, tokens=500, quick=True)[:1]
    with pytest.raises(ValueError, match=r"nowhere.* no dataset"):
        text.reproduce(cases, tmp_path / "to", held_out=tmp_path / "nowhere", quick=True)
    assert not (tmp_path / "to").exists()
