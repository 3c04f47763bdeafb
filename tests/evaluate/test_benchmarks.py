"""Benchmarks from files: asked as lm-eval asks them, and with energies beside the likelihood."""

import json
import sys
import types
import zipfile

import pytest
import torch
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.evaluate.benchmarks import FOLDER, NAMES
from nrgpt.evaluate.benchmarks.asking import ask
from nrgpt.evaluate.benchmarks.questions import FILES, HUB, TASKS, questions
from nrgpt.evaluate.preference import look

from ..characters import character_run

pytest.importorskip("lm_eval")
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from nrgpt.evaluate.tasks import run_tasks

PAIR = {"field": "syntax", "UID": "order"}
SAME = {"sentence_good": "A bird.", "sentence_bad": "A bird.", "field": "semantics", "UID": "same"}
CHOICES = [
    {"query": "Who sings?", "choices": ["A bird", "Zz%", "the QQ"], "gold": 0},
    {"query": "The sun sets in the", "choices": ["west", "xq"], "gold": 1},
]
OPTIONS = [{"context_options": ["It sets", "Q%"], "continuation": "in the west.", "gold": 0}]
FILED = {
    "lambada": [{"context": "The sun rises in the", "continuation": "east."}],
    "winogrande": OPTIONS,
    "winograd": OPTIONS,
} | dict.fromkeys(("arc_easy", "arc_challenge", "piqa", "openbookqa"), CHOICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in FILED.items():
        text = "".join(json.dumps(row | {"more": 1}) + "\n" for row in rows)
        (folder / FILES.get(name, f"{name}.jsonl")).write_text(text)
    sentences = [("The sun rises.", "The sun sesir."), ("A bird sings", "A birds sings")]
    pairs = [PAIR | {"sentence_good": good, "sentence_bad": bad} for good, bad in sentences]
    with zipfile.ZipFile(folder / FILES["blimp"], "w") as archive:
        archive.writestr("data/order.jsonl", "\n".join(map(json.dumps, pairs)))
        archive.writestr("data/same.jsonl", json.dumps(SAME))
        archive.writestr("__MACOSX/._same.jsonl", "no JSON")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return character_run(tmp_path_factory.mktemp("characters"), past="settled", prelude=1)


def likelihood(run, text, last=None):
    """Of a sentence, after the start of a text, or of its last characters; by one pass."""
    tokens = run.encode(text) if last else [*run.encode("\n"), *run.encode(text)]
    logits, _ = run.model(torch.tensor([tokens[:-1]]))
    chosen = logits[0].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
    return chosen[-(last or len(tokens)) :].sum().item()


def test_every_benchmark_from_files(run, folder):
    found = run_tasks(run, NAMES, data=folder)
    assert set(found.others) == set(NAMES)
    blimp = found.others["blimp"]
    good = [likelihood(run, s) for s in ("The sun rises.", "A bird sings")]
    bad = [likelihood(run, s) for s in ("The sun sesir.", "A birds sings")]
    right = sum(a > b for a, b in zip(good, bad, strict=True))
    assert right > 0
    assert blimp["metrics"]["syntax"] == right / 2
    assert blimp["metrics"]["semantics"] == 0  # equally likely: wrong
    assert blimp["metrics"]["acc"] == pytest.approx(right / 3)
    assert blimp["chance"] == 0.5
    of_word = likelihood(run, "The sun rises in the east.", last=len(" east."))
    assert found.others["lambada"]["metrics"]["perplexity"] == pytest.approx(
        torch.tensor(-of_word).exp().item(), rel=1e-4
    )
    assert "chance" not in found.others["lambada"]
    assert found.others["piqa"]["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    said = []
    for question in CHOICES:
        of_choice = [
            likelihood(run, f"{question['query']}\nAnswer: {choice}", last=len(choice) + 1)
            for choice in question["choices"]
        ]
        said.append(of_choice.index(max(of_choice)) == question["gold"])
    assert found.others["piqa"]["metrics"]["acc"] == sum(said) / 2
    right, wrong = (
        likelihood(run, f"{context} in the west.", last=len(" in the west."))
        for context in OPTIONS[0]["context_options"]
    )
    assert found.others["winograd"]["metrics"]["acc"] == float(right > wrong)
    assert found.energies is not None
    assert found.energies["energy"]["pairs"] == 3
    for name in NAMES:  # the same without lm-eval
        asked = ask(run, name, folder, batch_size=2)
        for metric, value in found.others[name]["metrics"].items():
            assert asked[metric] == pytest.approx(value, rel=1e-5), (name, metric)
    (table,) = found.tables()
    shown = list(table.columns[0].cells)
    assert set(shown) == set(NAMES)
    # Accuracy of all pairs and of two fields; four ways to ask the energy.
    assert shown.count("blimp") == 3 + 4


def test_energies_of_sentences_are_those_of_the_model(run):
    """However they are batched."""
    texts = ["A bird sings.", "The sun rises in the east.", "Who?"]
    together = look(run, texts, steps=5, batch_size=3)
    for text, seen in zip(texts, together, strict=True):
        idx = torch.tensor([[*run.encode("\n"), *run.encode(text)]])[:, :-1]
        *_, last = states = list(run.model.states(idx, steps=5))
        energy = sum(run.model.energies(last, start=states[0]).values()).sum().item()
        assert seen.energy == pytest.approx(energy, rel=1e-4)
        assert seen.mean_energy == pytest.approx(energy / idx.shape[1], rel=1e-4)
    assert together[0].likelihood != pytest.approx(likelihood(run, texts[0]))  # with 5 steps, not 3
    alone = look(run, texts, steps=None, batch_size=1)
    assert alone[0].likelihood == pytest.approx(likelihood(run, texts[0]), rel=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_task_files_serve_any_model_of_lm_eval(run, folder, tmp_path, monkeypatch):
    """An export, asked by lm-eval itself, has the same results."""
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv(TASKS, str(folder))
    place = tmp_path / "export"
    result = CliRunner().invoke(app, ["export", str(run.folder), "--to", str(place)])
    assert result.exit_code == 0, result.output
    theirs = HFLM(
        pretrained=str(place),
        device="cpu",
        dtype="float32",
        batch_size=4,
        prefix_token_id=run.encode("\n")[0],  # characters have no end of text
    )
    names = [f"nrgpt_{name}" for name in NAMES]
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    asked = simple_evaluate(theirs, tasks=names, task_manager=manager, bootstrap_iters=0)
    ours = run_tasks(run, NAMES, data=folder).others
    for name in NAMES:
        for metric, value in ours[name]["metrics"].items():
            other = asked["results"][f"nrgpt_{name}"][f"{metric},none"]
            assert other == pytest.approx(value, rel=1e-4), (name, metric)


def test_the_command(run, folder):
    command = ["evaluate", str(run.folder), "--no-loss", "--tasks", "blimp,winograd"]
    result = CliRunner().invoke(app, [*command, "--task-data", str(folder), "--limit", "1"])
    assert result.exit_code == 0, result.output
    kept = json.loads((run.folder / "evaluation.json").read_text())
    assert "blimp_energies" in json.dumps(kept)
    for arguments, said in (
        (["--task-data", str(folder / "no")], "--task-data"),
        (["--task-data", str(folder.parent)], "there is no file"),
    ):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code == 2
        assert said in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: is no JSON"),
        ("[1]", "query must be there, as str"),
        ('{"query": "a", "choices": ["b", "c"], "gold": "0"}', "gold must be there, as int"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "gold must be the number of one of"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "choices must be at least two texts"),
    ],
)
def test_bad_questions_are_named(tmp_path, line, said):
    (tmp_path / "piqa.jsonl").write_text(json.dumps(CHOICES[0]) + "\n" + line)
    with pytest.raises(ValueError, match=said):
        questions("piqa", tmp_path)


HUB_ROWS = {
    "nyu-mll/blimp": SAME,
    "EleutherAI/lambada_openai": {"text": "The sun rises in the east."},
    "allenai/ai2_arc": {
        "question": "Who sings?",
        "choices": {"text": ["A bird", "b"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "baber/piqa": {"goal": "To fly", "sol1": "be a bird", "sol2": "be a fish", "label": 0},
    "allenai/winogrande": {
        "sentence": "Ann met Bo, and _ sang.", "option1": "Ann", "option2": "Bo", "answer": "2",
    },
    "lighteval/winograd_wsc": {
        "text": "The cat saw the dog because it barked.", "pronoun": "it", "pronoun_loc": 28,
        "options": ["The cat", "The dog"], "label": 1,
    },
    "allenai/openbookqa": {
        "question_stem": "Birds", "choices": {"text": ["fly", "swim"], "label": ["A", "B"]},
        "answerKey": "A",
    },
}  # fmt: skip


def test_rows_of_the_hub_become_the_same_questions(monkeypatch):
    """As their pages describe them; the Hub itself is not asked."""
    fake = types.ModuleType("datasets")
    fake.get_dataset_config_names = lambda path: ["order", "same"]
    fake.load_dataset = lambda path, part, split: [HUB_ROWS[path]]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.delenv(TASKS, raising=False)
    found = {name: questions(name) for name in HUB}
    assert found["blimp"] == [SAME, SAME]
    assert found["lambada"] == FILED["lambada"]
    query = {"query": "Question: Who sings?", "choices": ["A bird", "b"], "gold": 1}
    assert found["arc_easy"] == found["arc_challenge"] == [query]
    assert found["piqa"][0]["choices"] == ["be a bird", "be a fish"]
    ann, bo = (f"Ann met Bo, and {name}" for name in ("Ann", "Bo"))
    assert found["winogrande"] == [
        {"context_options": [ann, bo], "continuation": "sang.", "gold": 1}
    ]
    assert found["winograd"][0]["context_options"][1] == "The cat saw the dog because the dog"
    assert found["winograd"][0]["continuation"] == "barked."
    assert found["openbookqa"] == [{"query": "Birds", "choices": ["fly", "swim"], "gold": 0}]
