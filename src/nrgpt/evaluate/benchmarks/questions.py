"""The questions of the benchmarks, from files or from the Hub, in one format for each.

blimp           sentence_good, sentence_bad, field, UID (the kind of pair)
lambada         context, continuation (the last word)
winogrande, winograd    context_options, continuation, gold: which context it goes with
all others      query, choices, gold
"""

import json
import lzma
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...extras import need

TASKS = "NRGPT_TASKS"
"""Environment variable: a folder with the files below, instead of the Hub."""
FILES = {
    "blimp": "BLiMP.zip",
    "lambada": "lambada_openai.jsonl",
    "openbookqa": "openbook_qa.jsonl",
    "winograd": "winograd_wsc.jsonl",
}
"""Where a file's name is not NAME.jsonl."""
MOST_BYTES = 1 << 30
"""Of an archive when unpacked; a small file could say that it holds terabytes."""
Question = dict[str, Any]
BY_CONTEXT = {"context_options": list, "continuation": str, "gold": int}
BY_CHOICE = {"query": str, "choices": list, "gold": int}
FIELDS: dict[str, dict[str, type]] = {
    "blimp": {"sentence_good": str, "sentence_bad": str, "field": str, "UID": str},
    "lambada": {"context": str, "continuation": str},
    "winogrande": BY_CONTEXT,
    "winograd": BY_CONTEXT,
    "arc_easy": BY_CHOICE,
    "arc_challenge": BY_CHOICE,
    "piqa": BY_CHOICE,
    "openbookqa": BY_CHOICE,
}


def questions(name: str, folder: str | Path | None = None) -> list[Question]:
    """All questions of a benchmark: from a folder, as given or as the environment says, or from
    the Hub. Pairs of BLiMP come one of each kind at a time, so that the first few are of all."""
    folder = folder or os.environ.get(TASKS)
    found = list(from_file(name, file_of(name, Path(folder))) if folder else from_hub(name))
    if not found:
        raise ValueError(f"{name}: there are no questions")
    if name != "blimp":
        return found
    seen: Counter[str] = Counter()
    numbered = []
    for question in found:
        numbered.append((seen[question["UID"]], question))
        seen[question["UID"]] += 1
    return [question for _, question in sorted(numbered, key=lambda pair: pair[0])]


def file_of(name: str, folder: Path) -> Path:
    """The file with a benchmark's questions, or an error that says what is missing."""
    path = folder / FILES.get(name, f"{name}.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"{TASKS}: for {name}, there is no file {path}")
    return path


def from_file(name: str, path: Path) -> Iterator[Question]:
    for where, line in lines(path):
        try:
            question = json.loads(line)
            json.dumps(question, ensure_ascii=False).encode()  # half a character is no text
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: is no JSON ({error})") from error
        yield checked(name, question, where)


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file, or of all .jsonl files in a .zip, and where they stand."""
    if path.suffix != ".zip":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{path}: line {number}", line
        return
    try:
        with zipfile.ZipFile(path) as archive:
            if (size := sum(info.file_size for info in archive.infolist())) > MOST_BYTES:
                raise ValueError(f"{path}: {size:,} bytes when unpacked, which is no benchmark")
            for inside in sorted(archive.namelist()):
                if inside.endswith(".jsonl") and not Path(inside).name.startswith("."):
                    with archive.open(inside) as file:
                        for number, line in enumerate(file, 1):
                            yield f"{path}: {inside}: line {number}", line
    except DAMAGED as error:
        raise ValueError(f"{path}: not an archive that can be read ({error})") from error


DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError,
           RuntimeError, struct.error)  # fmt: skip
"""What zipfile raises, if an archive is damaged, wants a password, or is packed in an odd way."""


def checked(name: str, question: Any, where: str) -> Question:
    """A question with the fields of its benchmark, or an error that names what is wrong."""
    fields = FIELDS[name]
    for field, kind in fields.items():
        if not isinstance(question, dict) or type(question.get(field)) is not kind:
            raise ValueError(f"{where}: {field} must be there, as {kind.__name__}")
    for field in {"continuation", "sentence_good", "sentence_bad"} & fields.keys():
        if not question[field]:
            raise ValueError(f"{where}: {field} is empty")
    for field in ("choices", "context_options"):
        options = question.get(field) if field in fields else None
        if options is not None:
            if len(options) < 2 or not all(
                isinstance(option, str) and option for option in options
            ):
                raise ValueError(f"{where}: {field} must be at least two texts, none of them empty")
            if not 0 <= question["gold"] < len(options):
                raise ValueError(f"{where}: gold must be the number of one of {field}, from 0")
    return {field: question[field] for field in fields}


# The Hub ------------------------------------------------------------------------------------------


def from_hub(name: str) -> Iterator[Question]:
    """The same questions as they are there."""
    datasets = need("datasets", f"the questions of {name}")
    path, parts, split, convert = HUB[name]
    if parts == "all":
        parts = tuple(sorted(datasets.get_dataset_config_names(path)))
    for part in parts:
        for row in datasets.load_dataset(path, part, split=split):
            yield checked(name, convert(row), f"{path} on the Hub")


def with_choices(row: Mapping[str, Any], question: str, prefix: str = "") -> Question:
    labels = row["choices"]["label"]
    gold = labels.index(row["answerKey"].strip())
    return {"query": prefix + row[question], "choices": list(row["choices"]["text"]), "gold": gold}


def arc(row: Mapping[str, Any]) -> Question:
    return with_choices(row, "question", "Question: ")


def openbookqa(row: Mapping[str, Any]) -> Question:
    return with_choices(row, "question_stem")


def piqa(row: Mapping[str, Any]) -> Question:
    choices = [row["sol1"], row["sol2"]]
    return {"query": f"Question: {row['goal']}", "choices": choices, "gold": int(row["label"])}


def lambada(row: Mapping[str, Any]) -> Question:
    context, _, word = row["text"].rpartition(" ")
    return {"context": context, "continuation": word}


def winogrande(row: Mapping[str, Any]) -> Question:
    before, _, after = row["sentence"].partition("_")
    contexts = [before + row[option] for option in ("option1", "option2")]
    gold = int(row["answer"]) - 1
    return {"context_options": contexts, "continuation": after.strip(), "gold": gold}


def winograd(row: Mapping[str, Any]) -> Question:
    """The names in the place of the pronoun, in the case that they have there."""
    at, pronoun = row["pronoun_loc"], row["pronoun"]
    before, after = row["text"][:at], row["text"][at + len(pronoun) :].strip()
    ending = "'s" if pronoun.lower() in ("my", "his", "her", "our", "their") else ""
    contexts = []
    for option in row["options"]:
        first, _, rest = option.partition(" ")
        if first in ("The", "A", "An", "My", "His", "Her", "Their") and before.strip()[-1:] != ".":
            option = f"{first.lower()} {rest}"
        contexts.append(before + option + ending)
    return {"context_options": contexts, "continuation": after, "gold": int(row["label"])}


Hub = tuple[str, Any, str, Callable[[Mapping[str, Any]], Question]]
HUB: dict[str, Hub] = {
    "blimp": ("nyu-mll/blimp", "all", "train", dict),
    "lambada": ("EleutherAI/lambada_openai", ("default",), "test", lambada),
    "arc_easy": ("allenai/ai2_arc", ("ARC-Easy",), "test", arc),
    "arc_challenge": ("allenai/ai2_arc", ("ARC-Challenge",), "test", arc),
    "piqa": ("baber/piqa", (None,), "validation", piqa),
    "winogrande": ("allenai/winogrande", ("winogrande_xl",), "validation", winogrande),
    "winograd": ("lighteval/winograd_wsc", ("wsc273",), "test", winograd),
    "openbookqa": ("allenai/openbookqa", ("main",), "test", openbookqa),
}
"""Where it is, its parts, the split, and how a row becomes a question."""
