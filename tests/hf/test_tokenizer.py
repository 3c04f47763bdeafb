"""Fast tokenizers give the same token numbers and texts as ours."""

import os
import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

from nrgpt.data.listops import ListOpsConfig, prepare_listops, read_expression, render
from nrgpt.data.shards import Dataset
from nrgpt.data.tokenizer import (
    END_OF_TEXT,
    GPT2_RANKS,
    GPT2Tokenizer,
    SymbolTokenizer,
    Tokenizer,
)
from nrgpt.hf.tokenizer import fast_tokenizer
from nrgpt.interop.exported import read_tokenizer

from ..data.test_tokenizer import use_small_ranks

TEXT = 'hello  hell\n\n\tShe\'ll say 123 "well"! \r\n héllo 漢字 🙂   \n x '


def saved_and_loaded(tokenizer, folder):
    fast_tokenizer(tokenizer, 32).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_characters(tmp_path):
    ours = SymbolTokenizer(sorted(set(TEXT + "]^-\\.*")))
    theirs = saved_and_loaded(ours, tmp_path)
    for text in (TEXT, "]^-\\.*", "", " ", "\n\n"):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    both = theirs(["he", "hello"], padding=True)
    assert both.attention_mask == [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    assert both.input_ids[0][0] == ours.vocab_size  # outside the vocabulary, but never read
    assert theirs.decode(both.input_ids[0], skip_special_tokens=True) == "he"
    for wrong in ("Zürich", ["he", "Zürich"], [["he", "Zürich"]]):
        with pytest.raises(ValueError, match="'Zü' at position 0 is not in this vocabulary"):
            theirs(wrong)


def test_listops_in_its_own_words_and_in_ours(tmp_path):
    ours = ListOpsConfig().tokenizer()
    theirs = saved_and_loaded(ours, tmp_path)
    text = "sum(max( 7 3 16) 6 0)=sum( 16 6 0)= 2<end>"
    assert theirs(text).input_ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == "sum(max(7,3,16),6,0) = sum(16,6,0) = 2 <end>"
    for written in (
        "sum(max(7,3, 16),6,0) = ",
        "max(1,2)=",
        "= sum(16,6 , 0)=2 <end>",
        " max( 1 )",
    ):
        assert theirs(written).input_ids == read_expression(written, ours)
    assert theirs.eos_token_id == theirs.pad_token_id == ours.number["<end>"]
    for wrong, place in (("max(?)", " at position 4"), ("max(77)", ""), ("max(1,x)", "")):
        with pytest.raises(ValueError, match=f"'{place}.* is not in this vocabulary"):
            theirs(wrong)


@pytest.mark.parametrize("notation", ["call", "lisp"])
def test_listops_is_decoded_as_we_do(tmp_path, notation):
    """Expressions, and anything else that a model may write; and tokens survive the round trip."""
    cfg = ListOpsConfig(
        notation=notation, depth=3, functions=("sum", "max", "median", "first"), train=40,
        validation=5, test=5, nesting=0.5,
    )  # fmt: skip
    ours = cfg.tokenizer()
    theirs = fast_tokenizer(ours, 64, lisp=notation == "lisp")
    prepare_listops(cfg, tmp_path / "data")
    tokens = Dataset.open(tmp_path / "data").tokens("train")
    expressions = tokens.read(0, len(tokens)).tolist()
    assert theirs.decode(expressions) == render(expressions, ours)
    assert theirs(theirs.decode(expressions)).input_ids == expressions
    if notation == "call":  # whether anything is lisp, render guesses
        anything = np.random.default_rng(0).integers(ours.vocab_size, size=2_000).tolist()
        assert theirs.decode(anything) == render(anything, ours)


@pytest.mark.parametrize("kind", ["characters", "listops", "lisp", "documents"])
def test_the_way_back_gives_the_same_tokenizer(tmp_path, monkeypatch, kind):
    """Without the library ``tokenizers``, too: the core does not need it."""
    ours = {
        "characters": SymbolTokenizer(sorted(set(TEXT + "]^-\\.*"))),
        "documents": SymbolTokenizer([*"ab c", END_OF_TEXT]),
        "listops": ListOpsConfig().tokenizer(),
        "lisp": ListOpsConfig(notation="lisp").tokenizer(),
    }[kind]
    fast_tokenizer(ours, 32, lisp=kind == "lisp").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    back = read_tokenizer(tmp_path)
    assert type(back) is SymbolTokenizer
    assert back.spec() == ours.spec()
    assert back.fingerprint() == ours.fingerprint()
    assert back.end_of_text == ours.end_of_text


def test_byte_pairs(tmp_path, monkeypatch):
    use_small_ranks(monkeypatch, tmp_path)
    ours = GPT2Tokenizer()
    theirs = saved_and_loaded(ours, tmp_path / "saved")
    assert theirs(TEXT).input_ids == ours.encode(TEXT)
    assert theirs.decode(ours.encode(TEXT)) == TEXT
    assert theirs("hell<|endoftext|>").input_ids == [*ours.encode("hell"), 50_256]


@pytest.mark.skipif(
    GPT2_RANKS not in os.environ, reason=f"needs GPT-2's vocabulary: {GPT2_RANKS} names it"
)
def test_all_of_gpt2(tmp_path):
    ours = GPT2Tokenizer()
    theirs = saved_and_loaded(ours, tmp_path)
    assert len(theirs) == ours.vocab_size
    assert theirs(TEXT).input_ids == ours.encode(TEXT)
    tokens = list(range(0, 50_256, 7))
    assert theirs.decode(tokens) == ours.decode(tokens)
    words = ours.decode(tokens).encode("utf-8", "ignore").decode()
    assert theirs(words).input_ids == ours.encode(words)


def test_a_tokenizer_of_ones_own():
    class Mine(Tokenizer):
        vocab_size = 1

        def encode(self, text):
            return []

        def decode(self, tokens):
            return ""

        def spec(self):
            return {}

    with pytest.raises(ValueError, match="Mine has no counterpart"):
        fast_tokenizer(Mine(), 8)
