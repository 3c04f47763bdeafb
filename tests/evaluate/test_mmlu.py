"""MMLU from csv files: the right questions, with the scores that we compute by hand."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.evaluate.mmlu import (
    COLUMNS,
    GROUPS,
    IN_TABLE,
    MMLU,
    SUBJECTS,
    MMLUResult,
    ask,
    csv_file,
    mmlu_tasks,
    prompt,
    read_questions,
    subjects_of,
)
from nrgpt.evaluate.tasks import run_tasks
from nrgpt.language_model import LanguageModel
from nrgpt.measure.listops import Score

from ..characters import character_run
from ..questions import write_questions


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return character_run(tmp_path_factory.mktemp("characters"), iterations=8, context=450)


@pytest.fixture
def folder(tmp_path):
    for subject, number in {"astronomy": 6, "anatomy": 3, "virology": 5, "sociology": 2}.items():
        write_questions(csv_file(tmp_path / "mmlu", "test", subject), number)
        write_questions(csv_file(tmp_path / "mmlu", "dev", subject), 5)
    return tmp_path / "mmlu"


def test_the_subjects_are_all_57_once():
    assert len(SUBJECTS) == len(set(SUBJECTS)) == 57
    assert list(GROUPS) == [
        "Astronomy", "Science", "CS", "Economics", "Medicine", "Math", "Global Facts",
    ]  # fmt: skip
    assert subjects_of(["mmlu_paper"], None) == list(IN_TABLE)
    assert subjects_of(["mmlu_virology", "mmlu_astronomy"], None) == ["astronomy", "virology"]


def by_hand(run, questions, shots, subject):
    """The likeliest letters, one unpadded prompt at a time."""
    intro = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    shown = "".join(f"{prompt(shot)} {'ABCD'[shot['answer']]}\n\n" for shot in shots)
    letters = [run.encode(letter)[0] for letter in "ABCD"]
    said = []
    for question in questions:
        tokens = run.encode(intro + shown + prompt(question) + " ")
        logits, _ = run.model(torch.tensor([tokens[-run.model.cfg.context :]]))
        said.append(int(logits[0, -1, letters].argmax()))
    return said


def restless(run):
    """A model that gives different answers to different questions."""
    model = LanguageModel(run.cfg.model).eval()
    with torch.no_grad():
        model.tokens.normal_()
        model.positions.normal_(std=5)  # questions differ mostly in length
    return dataclasses.replace(run, model=model)


def test_accuracy_is_that_of_the_likeliest_letters(run, folder):
    run = restless(run)
    asked = run_tasks(run, ["mmlu"], mmlu=folder, batch_size=5)
    assert asked.truncated == 6  # of 16
    result = asked.mmlu
    assert list(result.subjects) == ["astronomy", "anatomy", "virology", "sociology"]
    letters = set()
    for subject, score in result.subjects.items():
        questions = read_questions(csv_file(folder, "test", subject))
        shots = read_questions(csv_file(folder, "dev", subject))
        said = by_hand(run, questions, shots, subject)
        right = [question["answer"] == one for question, one in zip(questions, said, strict=True)]
        assert score == Score(sum(right), len(questions))
        letters |= set(said)
    assert len(letters) > 1
    assert 0 < result.overall.correct < 16
    assert ask(run, folder, batch_size=5) == result  # without the harness
    assert ask(run, folder, limit=2).overall.total == 8
    assert result.groups["Medicine"].total == 8
    assert result.others.total == 2
    assert result.overall.total == 16
    assert result.average is None


def test_prompts_of_the_harness(folder):
    (task,) = mmlu_tasks(["astronomy"], folder)
    task.build_all_requests(limit=1, rank=0, world_size=1)
    context, continuation = task.instances[1].args
    assert continuation == " B"
    assert len(task.instances) == 4
    assert context.startswith("The following are multiple choice questions (with answers) about ")
    assert context.count("Answer: ") == 5
    assert context.endswith('What, they "ask", is 0 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:')


def test_standard_errors():
    scores = {subject: Score(3, 10) for subject in IN_TABLE}
    scores["astronomy"] = Score(8, 10)
    result = MMLUResult(scores)
    assert result.groups["CS"] == Score(12, 40)
    mean, error = result.average
    assert mean == pytest.approx((0.8 + 6 * 0.3) / 7)
    sizes = [10, 80, 40, 30, 70, 50, 10]
    variances = [0.16 / 9] + [0.21 / (size - 1) for size in sizes[1:]]
    assert error == pytest.approx(math.sqrt(sum(variances)) / 7)
    stored = result.as_dict()
    assert stored["groups"]["Math"]["stderr"] == pytest.approx(math.sqrt(0.21 / 49))
    assert stored["others"] is None
    assert MMLUResult({"sociology": Score(1, 1)}).as_dict()["overall"]["stderr"] is None
    assert result.table().row_count == 9
    assert MMLUResult({"sociology": Score(1, 1)}).table().row_count == 2


def test_the_command_and_its_record(run, folder, monkeypatch):
    arguments = ["evaluate", str(run.folder), "--no-loss", "--tasks", "mmlu,mmlu_anatomy"]
    result = CliRunner().invoke(app, [*arguments, "--mmlu", str(folder), "--limit", "2"])
    assert result.exit_code == 0, result.output
    assert "Medicine" in result.output
    monkeypatch.setenv(MMLU, str(folder))
    result = CliRunner().invoke(app, [*arguments[:-1], "mmlu_anatomy", "--steps", "2"])
    assert result.exit_code == 0, result.output
    first, second = json.loads((run.folder / "evaluation.json").read_text())["entries"]
    assert first["settings"]["limit"] == 2
    assert first["tasks"]["mmlu"]["overall"]["total"] == 8
    assert second["settings"]["steps"] == 2
    assert second["tasks"]["mmlu"]["groups"]["Medicine"]["total"] == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["question,a,b,c,d,answer"], "columns must be question,choice0"),
        ([",".join(COLUMNS), "Why?,1,2,3,4,4"], "line 2: must be a question, four choices"),
        ([",".join(COLUMNS), "Why?,1,2,3"], "line 2: must be a question, four choices"),
        ([",".join(COLUMNS)], "has no questions"),
    ],
)
def test_files_that_cannot_be_used(folder, rows, said):
    path = csv_file(folder, "test", "astronomy")
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=said):
        mmlu_tasks(["astronomy"], folder)


def test_files_that_are_missing(run, folder, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no subject of MMLU"):
        run_tasks(run, ["mmlu"], mmlu=tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        run_tasks(run, ["mmlu"], mmlu=tmp_path / "nowhere")
    csv_file(folder, "dev", "sociology").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*sociology_dev\.csv"):
        run_tasks(run, ["mmlu_sociology"], mmlu=folder)
    write_questions(csv_file(folder, "dev", "sociology"), 4)
    with pytest.raises(ValueError, match="fewer than the 5 examples"):
        mmlu_tasks(["sociology"], folder)
    with pytest.raises(ValueError, match="no subject 'astrology'; did you mean 'astronomy'"):
        mmlu_tasks(["astrology"], folder)
    monkeypatch.setenv(MMLU, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=MMLU):
        run_tasks(run, ["mmlu"])


@pytest.mark.skipif(MMLU not in os.environ, reason=f"needs MMLU: {MMLU} names its folder")
def test_the_real_files():
    folder = Path(os.environ[MMLU])
    assert subjects_of(["mmlu"], folder) == list(SUBJECTS)
    questions = [read_questions(csv_file(folder, "test", subject)) for subject in SUBJECTS]
    assert sum(map(len, questions)) == 14_042
    assert all(len(read_questions(csv_file(folder, "dev", s))) == 5 for s in SUBJECTS)
