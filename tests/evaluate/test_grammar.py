"""The grammar quality score: what the rules find, and what they accept."""

import math

import pytest

from nrgpt.evaluate.grammar import (
    RULES,
    SEVERITY,
    flesch_kincaid,
    grammar,
    mistakes,
    sentences,
    spelling,
    syllables,
)

WRONG = {
    "agreement": ["He are here.", "They was late.", "I is tired.", "These is mine.", "You has it."],
    "tense": ["She did went home.", "He will was there.", "It has went.", "They were came."],
    "structure": ["We saw the. Then we left.", "The is good.", "And but he ran.", "Of was it."],
    "pronouns": ["Between you and I, no.", "Give it to he.", "Me am glad.", "Its a dog."],
    "articles": ["It is a apple.", "He has an dog.", "I saw the a man."],
    "prepositions": ["You should of gone.", "Get off of it.", "It is of to it."],
    "repetition": ["We saw saw it.", "The the man."],
    "word choice": ["It is better then that.", "It is more better.", "Their is one."],
    "capitals": ["It is so. then it went.", "Then i went.", "On monday it rained."],
    "punctuation": ["It went , and came.", "It went.Then it came.", "It went,, and."],
}

RIGHT = """\
He and she are here, and so am I. If it were mine, they would have it. The will was read; his might
had gone. A unit, a European, a one-off, an hour, an honest man. What are these? It is a dog, and
its tail was long. You and I are friends. That that is, is. They had had enough, very very soon.
Mr. Smith said so, i.e. he wrote it. On Monday I saw Dr. Jones, J. B. Priestley and others. We went
to Rome (in May) ... and back! "Who goes there?" he asked. It cost 3.50, or 1,000 in all."""


@pytest.mark.parametrize("category", list(RULES))
def test_mistakes_are_found_under_their_names(category):
    for text in WRONG[category]:
        assert category in {mistake.category for mistake in mistakes(text)}, text


def test_correct_sentences_are_accepted():
    assert mistakes(RIGHT) == []


def test_there_are_ten_categories_each_with_a_severity():
    assert set(RULES) == set(SEVERITY) == set(WRONG)
    assert len(RULES) == 10
    assert all(0 < severity <= 1 for severity in SEVERITY.values())


def test_mistakes_come_in_the_order_of_the_text():
    found = mistakes("They   was late.\nThen i\nsaw saw it.")
    assert [mistake.text for mistake in found] == ["They was", "i", "saw saw"]
    assert [mistake.severity for mistake in found] == [1.0, 0.3, 0.7]


def test_spelling_forgives_names_if_asked():
    assert spelling("The house of Qwzbrt is old, isn't it?") == 1
    assert spelling("The house of Qwzbrt is old.", forgive_names=False) == pytest.approx(5 / 6)
    assert spelling("The huose is old.") == pytest.approx(3 / 4)
    assert spelling("Qwzbrt is old.\nQwzbrt too.") == pytest.approx(3 / 5)
    assert spelling("We couldn't, can't, they've, you'll, the king's xqzk's") == pytest.approx(
        7 / 8
    )
    assert spelling("QWZBRT: o'er the king's house, i' the night; I realise a favour") == 1
    assert spelling("") == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "a the make walked hopes strength eye"),
        (2, "table little wanted houses apple rises"),
        (3, "banana elephant"),
        (4, "information"),
    ],
)
def test_syllables(number, words):
    assert {word: syllables(word) for word in words.split()} == dict.fromkeys(words.split(), number)


def test_flesch_kincaid_is_the_formula():
    assert flesch_kincaid("The cat sat on the mat.") == pytest.approx(0.39 * 6 + 11.8 - 15.59)
    two = "The cat sat. Information is a banana!"
    assert flesch_kincaid(two) == pytest.approx(0.39 * 7 / 2 + 11.8 * 12 / 7 - 15.59)
    assert flesch_kincaid("...") == 0


def test_sentences():
    text = 'He said "No." Then he\nleft... ROMEO:\n\nWhat? 12. "Yes!" 3 a'
    assert sentences(text) == ['He said "No.', "Then he left...", "ROMEO:", "What?", '"Yes!', "3 a"]
    assert sentences(" \n. ?") == []


def test_the_scores_are_their_formulas():
    text = "The old man was at home. They was late and cold, and the huose of the king was old."
    found = grammar(text)
    assert found.counts == {"agreement": 1}
    rate = 100 / 19
    assert found.mistakes_per_100_words == pytest.approx(rate)
    readable = 1 - max(0, 3 - found.grade) / 10
    expected = 0.5 * math.exp(-rate / 5) + 0.3 * (1 - 4 / 19) + 0.2 * readable
    assert found.gqs == pytest.approx(100 * expected)
    paper = 0.5 * (1 - 1 / 19) + 0.3 * 18 / 19 + 0.2 * 0.7
    assert found.gqs_paper == pytest.approx(paper)


def test_scores_tell_good_from_bad_and_stay_in_range():
    good = grammar(RIGHT)
    bad = grammar(" ".join(text for texts in WRONG.values() for text in texts))
    noise = grammar("xqk zzkt . , the of a an the , blorf is was i i gkwq " * 20)
    assert 90 < good.gqs <= 100
    assert 0 <= noise.gqs < bad.gqs < 75 < good.gqs
    assert 0 <= noise.gqs_paper < bad.gqs_paper < good.gqs_paper <= 1
    assert grammar("...").gqs == grammar("").gqs_paper == 0
