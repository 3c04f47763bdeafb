"""What people and files say that is wrong: refused in words, never with a traceback."""

import contextlib
import dataclasses
import json
import shutil

import pytest

from nrgpt.data.documents import documents_of_all, open_source
from nrgpt.data.own import tokenizer_for
from nrgpt.data.shards import DataError, Dataset
from nrgpt.data.tokenizer import load_tokenizer
from nrgpt.files import read_json, read_sealed, sealed, unsealed
from nrgpt.interop.weights import check_config_file, check_index
from nrgpt.reproduce.records import parse_line
from nrgpt.train.metrics import read
from nrgpt.train.overrides import known_names, override, parse
from nrgpt.train.presets import PRESETS
from nrgpt.train.runs import config_of, read_config
from nrgpt.train.search import RANGE, read_range
from tests.processes import patience
from tests.runs import debug

from .harm import mutated

WRONG = (
    "", "x", "-1", "0", "1.5", "1e999", "-1e999", "nan", "None", "true", "()", "(1,)", "('a','b')",
    "(1.5,2.5)", "[]", "{}", "{[]: 1}", "9" * 40, "-" + "9" * 40, "'", "((", "__import__('os')",
    "a" * 5000, "(" * 5000, "\x00", "ö",
)  # fmt: skip


def test_bad_configurations(faults, many):
    """Every field with every wrong value: refused with its name, or taken and kept as it is."""
    cfg, refused = PRESETS["debug"](), 0
    with faults("bad configurations") as tried:
        for name in known_names(cfg):
            for value in WRONG[:: many(6, 1)]:
                with tried.fault(f"{name}={value[:50]}"):
                    try:
                        made = override(cfg, [f"{name}={value}"])
                    except ValueError:
                        refused += 1
                        continue
                    if name == "plugins":  # those would have to be loaded
                        continue
                    text = json.loads(sealed(dataclasses.asdict(made)))
                    assert config_of(text, "here") == made
        assert refused >= 200 or tried.tried < 400


def formats(trained, tmp_path):
    """A sound file of each format, and its reader."""
    run, data = trained / "run", next((trained / "data").iterdir())
    index = json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}})
    record = {"case": "a", "files": {"config.json": {"seed": 0}, "samples.txt": "x"}}
    expected = {name: read_sealed(run / name) for name in ("config.json", "tokenizer.json")}

    def sealed_as_before(path):
        fields = read_sealed(path)
        # A mutation that takes the checksum with it is an older file; such are read as they are.
        assert fields in expected.values() or "checksum" not in read_json(path)

    pairs = tokenizer_for("bpe", lambda: ["the sun rises in the east "] * 9, None, 300).spec()

    def lines(path):
        return list(documents_of_all([(path, open_source(path, "<|endoftext|>", "text"))]))

    return {
        "config.json": ((run / "config.json").read_bytes(), read_config),
        "sealed JSON": ((run / "tokenizer.json").read_bytes(), sealed_as_before),
        "tokenizer.json": (
            (run / "tokenizer.json").read_bytes(),
            lambda path: load_tokenizer(unsealed(read_json(path), path)),
        ),
        "byte pairs": (
            pairs["json"].encode(),
            lambda path: load_tokenizer(pairs | {"json": path.read_text(errors="replace")}),
        ),
        "metrics.jsonl": ((run / "metrics.jsonl").read_bytes(), read),
        "model.safetensors.index.json": (index.encode(), check_index),
        "adapter_config.json": (b'{"base_model_name_or_path": "x"}', check_config_file),
        "records.jsonl": (
            json.dumps(record).encode(),
            lambda path: parse_line(path.read_bytes(), "here"),
        ),
        "text.txt": ("One.\n<|endoftext|>\nTwo ö.\n".encode(), lines),
        "text.jsonl": (b'{"text": "One."}\n{"text": "Two."}\n', lines),
        "overrides": (
            b"model.width=64",
            lambda path: override(debug(), [path.read_text(errors="replace")]),
        ),
        "numbers": (b"(1, 2.5, 'a', None)", lambda path: parse(path.read_text(errors="replace"))),
        "ranges": (b"log(1e-4,1e-2)", read_a_range),
        "manifest.json": ((data / "manifest.json").read_bytes(), None),
    }


def read_a_range(path):
    text = path.read_text(errors="replace")
    if RANGE.fullmatch(text):
        read_range("lr", text)


NAMES = (
    "config.json", "sealed JSON", "tokenizer.json", "byte pairs", "metrics.jsonl",
    "adapter_config.json",
    "model.safetensors.index.json", "records.jsonl", "text.txt", "text.jsonl", "overrides",
    "numbers", "ranges", "manifest.json",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_mutations(trained, tmp_path, faults, many, name):
    content, reader = formats(trained, tmp_path)[name]
    path = tmp_path / name.replace(" ", "-")
    if reader is None:
        shutil.copytree(next((trained / "data").iterdir()), tmp_path / "data")
        path = tmp_path / "data" / name
        reader = lambda path: Dataset.open(path.parent)  # noqa: E731
    with faults(f"mutations of {name}") as tried:
        for number in range(many(60, 10_000)):
            path.write_bytes(mutated(content, number))
            with (
                tried.fault(number),
                contextlib.suppress(ValueError, ImportError, FileNotFoundError),
            ):
                reader(path)


@pytest.mark.parametrize(
    "name", ["train-00000.bin", "val-00000.bin", "manifest.json", "test.jsonl"]
)
def test_damaged_data(trained, tmp_path, faults, many, name):
    data = tmp_path / "data"
    shutil.copytree(next((trained / "data").iterdir()), data)
    content = (data / name).read_bytes()
    expected = Dataset.open(data).fingerprint
    with faults("damaged datasets") as tried:
        for number in range(many(10, 500)):
            (data / name).write_bytes(mutated(content, number))
            with tried.fault(f"{name}, {number}"):
                try:
                    found = Dataset.open(data).fingerprint
                except DataError as error:
                    if str(data) not in str(error):
                        raise AssertionError("it does not say which file") from error
                    continue
                is_same = (data / name).read_bytes() == content
                # The checksums are in the manifest; of its other fields the fingerprint tells, by
                # which a run knows its data.
                assert is_same or name == "manifest.json"
                assert is_same or found != expected or json.loads(content) == read_json(data / name)


def test_threads(trained, faults, many):
    """A shared model, read and used by several threads."""
    import threading

    from nrgpt.train.runs import load_run

    expected = load_run(trained / "run").model.generate([[1, 2, 3], [4]], max_new_tokens=20)
    with faults("threads") as tried:
        shared, found = load_run(trained / "run").model.train(), []

        def go(cache):
            own = load_run(trained / "run").model
            for model in (own, shared):
                found.append(model.generate([[1, 2, 3], [4]], max_new_tokens=20, cache=cache))

        for number in range(many(3, 100)):
            threads = [threading.Thread(target=go, args=(c,)) for c in ("exact", "none", "exact")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(patience())
            for texts in found:
                with tried.fault(number):
                    assert texts == expected
            found.clear()
