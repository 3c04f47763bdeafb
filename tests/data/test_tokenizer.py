"""Text to tokens and back, and errors that say what to do."""

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
import tiktoken

from nrgpt.data import tokenizer as tokenizer_module
from nrgpt.data.tokenizer import (
    GPT2_PATTERN,
    GPT2_RANKS,
    GPT2Tokenizer,
    SymbolTokenizer,
    load_tokenizer,
)

needs_real_ranks = pytest.mark.skipif(
    GPT2_RANKS not in os.environ, reason=f"{GPT2_RANKS} is not set"
)


def use_small_ranks(monkeypatch, folder):
    """GPT-2's machinery with bytes and a few merges, so that tests need no download."""
    merges = [b"he", b"ll", b"hell", b"\n\n", b"\r\n"]
    ranks = [bytes([i]) for i in range(256)] + merges
    path = folder / "small.tiktoken"
    encoded = [base64.b64encode(token).decode() for token in ranks]
    path.write_text("".join(f"{token} {i}\n" for i, token in enumerate(encoded)))
    checksum = hashlib.sha256("".join(f"{token}\n" for token in encoded).encode()).hexdigest()
    monkeypatch.setattr(tokenizer_module, "GPT2_SHA256", checksum)
    monkeypatch.setenv(GPT2_RANKS, str(path))


def test_characters_there_and_back():
    tokenizer = SymbolTokenizer(sorted(set("to be\nor not")))
    tokens = tokenizer.encode("not to be\n")
    assert tokens == [tokenizer.symbols.index(c) for c in "not to be\n"]
    assert tokenizer.decode(tokens) == "not to be\n"
    assert tokenizer.vocab_size == 8


def test_the_longest_symbol_wins_and_spaces_are_symbols_like_any_other():
    tokenizer = SymbolTokenizer(["m", "max", "(", ")", " ", "1", "12", "\n", "."])
    assert tokenizer.encode("max(12 1)\nm.") == [1, 2, 6, 4, 5, 3, 7, 0, 8]
    assert tokenizer.decode([1, 2, 6, 4, 5, 3]) == "max(12 1)"


@pytest.mark.parametrize(
    ("symbols", "text", "said"),
    [
        (["a", "b"], "abXa", "'X' at position 2 is not in this vocabulary of 2 symbols"),
        (["max", "1"], "max1?1", r"'\?' at position 4"),
        (["max", "1"], "1ma", "'m' at position 1"),
    ],
)
def test_unknown_symbols_are_named_with_their_position(symbols, text, said):
    with pytest.raises(ValueError, match=said):
        SymbolTokenizer(symbols).encode(text)


@pytest.mark.parametrize("symbols", [["a", "b", "a"], ["a", ""]])
def test_symbols_must_be_distinct_and_not_empty(symbols):
    with pytest.raises(ValueError, match="distinct and not empty"):
        SymbolTokenizer(symbols)


def test_a_tokenizer_survives_json_and_its_fingerprint_tells_it_from_others():
    tokenizer = SymbolTokenizer(["a", "é", "\n"])
    again = load_tokenizer(json.loads(json.dumps(tokenizer.spec())))
    assert again.encode("é\na") == [1, 2, 0]
    assert again.fingerprint() == tokenizer.fingerprint()
    assert SymbolTokenizer(["é", "a", "\n"]).fingerprint() != tokenizer.fingerprint()
    assert GPT2Tokenizer().fingerprint() != tokenizer.fingerprint()
    assert isinstance(load_tokenizer(GPT2Tokenizer().spec()), GPT2Tokenizer)
    with pytest.raises(ValueError, match=r"unknown tokenizer \{'kind': 'words'\}; known kinds"):
        load_tokenizer({"kind": "words"})


def test_gpt2_from_a_local_file_of_ranks(monkeypatch, tmp_path):
    use_small_ranks(monkeypatch, tmp_path)
    tokenizer = GPT2Tokenizer()
    assert tokenizer.encode("hello he") == [258, ord("o"), ord(" "), 256]
    assert tokenizer.decode([258, ord("o")]) == "hello"
    # Models may pad the vocabulary; their tokens beyond GPT-2's are no text.
    assert tokenizer.decode([256, 50_257, 50_300]) == "he"
    assert tokenizer.decode([256, tokenizer.end_of_text]) == "he<|endoftext|>"


def test_text_cannot_smuggle_in_the_end_of_text(monkeypatch, tmp_path):
    use_small_ranks(monkeypatch, tmp_path)
    tokenizer = GPT2Tokenizer()
    assert tokenizer.end_of_text not in tokenizer.encode("a<|endoftext|>b")


def test_ranks_that_are_not_those_of_gpt2_are_refused(monkeypatch, tmp_path):
    use_small_ranks(monkeypatch, tmp_path)
    path = tmp_path / "small.tiktoken"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))  # truncated
    with pytest.raises(ValueError, match=r"small\.tiktoken: these are not GPT-2's ranks"):
        GPT2Tokenizer().encode("a")
    path.write_text("not a rank in sight")
    with pytest.raises(ValueError, match=r"small\.tiktoken: not a file of ranks"):
        GPT2Tokenizer().encode("a")


def test_gpt2_without_its_file_says_which_variable_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv(GPT2_RANKS, str(tmp_path / "nowhere.tiktoken"))
    with pytest.raises(FileNotFoundError, match=rf"{GPT2_RANKS} = .*nowhere\.tiktoken"):
        GPT2Tokenizer().encode("a")

    def no_network(name):
        raise ConnectionError("no route to host")

    monkeypatch.delenv(GPT2_RANKS)
    tokenizer_module.gpt2_encoding.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(ValueError, match=f"set {GPT2_RANKS} to a local gpt2.tiktoken file"):
        GPT2Tokenizer().encode("a")


def test_the_pattern_is_that_of_tiktoken():
    public = pytest.importorskip("tiktoken_ext.openai_public")
    assert public.r50k_pat_str == GPT2_PATTERN


@needs_real_ranks
def test_gpt2_with_its_real_ranks():
    tokenizer = GPT2Tokenizer()
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encoding.n_vocab == tokenizer.vocab_size


@needs_real_ranks
@pytest.mark.skipif(
    "NRGPT_SHAKESPEARE" not in os.environ, reason="needs Shakespeare: NRGPT_SHAKESPEARE names it"
)
def test_shakespeare_has_as_many_gpt2_tokens_as_for_others():
    text = Path(os.environ["NRGPT_SHAKESPEARE"]).read_text()
    assert len(GPT2Tokenizer().encode(text)) == 338_025
