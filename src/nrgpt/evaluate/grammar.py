r"""Grammar quality: mistakes found by rules, spelling, readability, and two scores made of them.

The formulas are in docs/evaluation.md. ``gqs_paper`` has the paper's weights, but its values cannot
be compared with the paper's: the paper's rules are not published, so these are our own. It barely
separates good from bad text (ten mistakes in 100 words cost 0.05 out of 1), hence ``gqs``.
"""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..extras import need

SEVERITIES = {  # 1 breaks the sentence, 0.3 is a slip of typing
    1.0: ("agreement", "tense", "structure"),
    0.7: ("pronouns", "articles", "prepositions", "repetition"),
    0.5: ("word choice",),
    0.3: ("capitals", "punctuation"),
}
SEVERITY = {name: severity for severity, names in SEVERITIES.items() for name in names}

START = r"(?:^|(?<=[.!?]\s))"  # of a sentence
PAST = r"(?:went|came|saw|gave|knew|took|began|was|were|had)"
NOUN_BEFORE = r"(?<!\b[Tt]he )(?<!\b[Hh]is )(?<!\b[Hh]er )(?<!\b[Mm]y )(?<!\b[Yy]our )"
COMPARATIVE = r"(?:better|worse|easier|bigger|larger|smaller|faster|older|higher|lower|greater)"

RULES: dict[str, tuple[str, ...]] = {
    "agreement": (
        r"(?<!\band )\b(?:[Hh]e|[Ss]he|[Ii]t) (?:are|am)\b",
        r"\b(?:[Ww]e|[Tt]hey) (?:is|was|has|does|am)\b",
        r"(?<!\band )\bI (?:is|are|has|does)\b",
        r"\b[Yy]ou (?:is|am|has|does)\b",
        r"\b(?:[Tt]his|[Tt]hat) (?:are|were) (?:a|an|the)\b",
        r"\b(?:[Tt]hese|[Tt]hose) (?:is|was|has|does)\b",
        r"\b[Tt]here (?:is|was) (?:many|several|few|two|three|four|five|six|seven|eight)\b",
    ),
    "tense": (
        rf"\b(?:did|didn't|doesn't) (?:not )?{PAST}\b",
        rf"{NOUN_BEFORE}\b(?:will|would|can|could|shall|should|must) (?:not )?{PAST}\b",
        rf"{NOUN_BEFORE}\b(?:will|would|could|shall|should|must) (?:not )?(?:is|are|am|has)\b",
        r"\b(?:have|has|had) (?:not )?(?:went|came|saw|gave|knew|took|began)\b",
        r"\b(?:is|are|was|were) (?:went|goes|came|gave|knew|began)\b",
    ),
    "structure": (
        r"\b(?:the|a|an|and|or|my|your|their|our) ?[.!?;](?=\s|$)",
        r"(?i:\b(?:the|an|my|your|their|our) (?:is|are|was|were|and|or|but|of|has|had|am)\b(?!-))",
        r"(?i:\b(?:and|but|or) (?:and|but|or)\b)",
        r"(?i:\b(?:of|to|for|from|with|at) (?:is|are|was|were|has|had)\b)",
        r"\b[Tt]he reason (?:\w+ ){0,4}is because\b",
    ),
    "pronouns": (
        r"\b[Bb]etween \w+ and I\b",
        r"\b(?:to|with|from|at) (?:he|they|we)\b(?! (?:who|that))",
        rf"{START}(?:Me|Him|Them|Us) (?:is|am|are|was|were)\b",
        r"\b(?:hisself|theirselves|ourself|theirself)\b",
        r"\b[Yy]our (?:welcome|a|an|the|not)\b",
        r"\b[Ii]ts (?:a|an|the|not|been)\b",
    ),
    "articles": (
        # "a unit", "a European", "a one": they start with a vowel but do not sound like it.
        rf"(?:\ba|{START}A) (?!(?:one|once|eu|ewe|u[bfkrstn][iaeu]|unanim)\w*)[aeiou][a-z]+\b",
        # "an hour", "an historian" are fine; before a pronoun, "an" is an old word for "if".
        rf"(?:\ban|{START}An) (?!(?:thou|thee|ye|you|they|we|your)\b)[bcdfgjklmnpqrstvwyz][a-z]+\b",
        r"\b(?:a|an|the) (?:a|an|the|my|his|their|our)\b(?!-)",
    ),
    "prepositions": (
        r"\b(?:could|should|would|might|must) of\b(?! course)",
        r"\boff of\b",
        r"\b(?:discuss|discussed|discusses) about\b",
        r"\b(?:of to|to of|with of|for of|of with|of from)\b(?!-)",
    ),
    "repetition": (r"(?i:\b(?!(?:had|that|ha|very|no|long|far)\b)([a-z]+) \1\b)",),
    "word choice": (
        rf"\b(?:{COMPARATIVE}|rather) then\b",
        rf"\bmore {COMPARATIVE}\b",
        r"\bmost (?:best|worst|biggest|largest|smallest|highest|lowest|greatest)\b",
        r"\b[Tt]heir (?:is|are|was|were)\b",
        r"\b(?:to|will|not) loose\b",
        r"\b(?:alot|irregardless|could care less)\b",
    ),
    "capitals": (
        # Full stops after "Mr.", "e.g." or an initial do not end a sentence.
        r"(?<!\.)(?<!\b[A-Za-z])(?<!\b(?:Mr|Dr|St|vs|No))(?<!\b(?:Mrs|etc))\. [a-z]",
        r"(?<![\w.'(])i(?:'m|'ll|'ve|'d)?(?![\w.')-])",
        r"\b(?:monday|tuesday|wednesday|thursday|friday|saturday|sunday)s?\b",
        r"\b(?:january|february|april|june|july|september|october|november|december)\b",
    ),
    "punctuation": (
        r" [,;:!?]| \.(?![.\d])",
        r"[a-z][,;][A-Za-z]",
        r"[a-z]\.[A-Z][a-z]",
        r",[,.;:]|;[,.;]|:[,.;:]|(?<!\.)\.\.(?!\.)|[.?!],",
        r"\( | \)",
    ),
}
"""Regular expressions that match mistakes, case-sensitively, in text with single spaces."""


@dataclass(frozen=True)
class Mistake:
    category: str
    text: str
    start: int

    @property
    def severity(self) -> float:
        return SEVERITY[self.category]


def mistakes(text: str) -> list[Mistake]:
    """What the rules find, in order. Positions count in the text with single spaces."""
    text = " ".join(text.split())
    found = [
        Mistake(category, match.group(), match.start())
        for category, rules in RULES.items()
        for rule in rules
        for match in re.finditer(rule, text)
    ]
    return sorted(found, key=lambda mistake: (mistake.start, mistake.category))


@functools.cache
def dictionary() -> Any:
    return need("spellchecker", "the spelling of texts").SpellChecker()


WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*")  # noqa: RUF001


def is_known(word: str) -> bool:
    """Whether the (American) dictionary has the word or, around an apostrophe, its parts."""
    word = word.lower().replace("’", "'")  # noqa: RUF001
    american = {word.replace("our", "or"), re.sub(r"is(?=e|ing|ation)", "iz", word)}
    known = dictionary().known
    if known({word} | american):
        return True
    parts = word.split("'")
    return len(parts) > 1 and all(len(part) <= 2 or known([part]) for part in parts)


def spelling(text: str, *, forgive_names: bool = True) -> float:
    """The share of words that the dictionary knows. A name is a word in capitals, or one that
    starts with a capital but not a sentence or a line."""
    total, known = 0, 0
    for match in WORD.finditer(text):
        word = match.group()
        before = text[: match.start()].rstrip(" \t\"'(")
        starts = not before or before[-1] in ".!?\n:"
        is_name = forgive_names and (word.isupper() or (word[0].isupper() and not starts))
        total += 1
        known += is_name or is_known(word)
    return known / total if total else 1.0


def syllables(word: str) -> int:
    """The number of vowel groups, without a silent -e or -ed at the end; at least one."""
    word = re.sub(r"[^a-z]", "", word.lower())
    groups = len(re.findall(r"[aeiouy]+", word))
    if re.search(r"[^aeiouyl]e$|[aeiouy]le$|[^aeiouytd]ed$|[^aeiouysxzcg]es$", word):
        groups -= 1
    return max(1, groups)


def sentences(text: str) -> list[str]:
    """Pieces that end in . ! ? or an empty line and contain a letter."""
    pieces = re.split(r"(?<=[.!?])[\"')]*\s+|\n\s*\n", text)
    return [" ".join(piece.split()) for piece in pieces if re.search(r"[A-Za-z]", piece)]


def flesch_kincaid(text: str) -> float:
    """The school grade: 0.39 words per sentence + 11.8 syllables per word - 15.59."""
    words = WORD.findall(text)
    if not words:
        return 0.0
    per_word = sum(map(syllables, words)) / len(words)
    return 0.39 * len(words) / max(1, len(sentences(text))) + 11.8 * per_word - 15.59


@dataclass(frozen=True)
class Grammar:
    gqs: float
    gqs_paper: float
    mistakes_per_100_words: float  # weighted by severity
    spelling: float
    grade: float
    counts: dict[str, int]


def grammar(text: str) -> Grammar:
    """All measures of one text. Without any words, its scores are 0."""
    words = len(WORD.findall(text))
    if words == 0:
        return Grammar(0.0, 0.0, 0.0, 0.0, 0.0, {})
    found = mistakes(text)
    rate = 100 * sum(mistake.severity for mistake in found) / words
    grade, known = flesch_kincaid(text), spelling(text)
    readable = max(0.0, 1 - max(0.0, 3 - grade, grade - 14) / 10)
    spelled = max(0.0, 1 - 4 * (1 - known))
    gqs = 100 * (0.5 * math.exp(-rate / 5) + 0.3 * spelled + 0.2 * readable)
    paper = 0.5 * max(0.0, 1 - rate / 100) + 0.3 * spelling(text, forgive_names=False)
    paper += 0.2 * (1.0 if 8 <= grade <= 12 else 0.7)
    counts = dict(Counter(mistake.category for mistake in found))
    return Grammar(gqs, paper, rate, known, grade, counts)
