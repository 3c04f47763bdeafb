"""Records of many runs in one file: nothing is lost, and nothing half written."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from nrgpt.reproduce import records
from nrgpt.reproduce.records import Record

FILES = {
    "config.json": json.dumps({"seed": 0, "lr": 1e-05, "name": "ö", "none": None}, indent=1),
    "with_newline.json": json.dumps({"seed": 0}, indent=1) + "\n",
    "other_form.json": '{"seed":0, "seed":1}',
    "a_string.json": '"text"',
    "no_json.json": "{",
    "metrics.jsonl": '{"step": 1, "loss": 0.1}\n{"step": 2, "loss": NaN}\n',
    "cut.jsonl": '{"step": 1}\n{"st',
    "empty.jsonl": "",
    "separator.jsonl": '{"text": "\u2028"}\n',
    "samples.txt": "first\r\nsecond\u2028ö",
}
CONTENT = {name: text.encode() for name, text in FILES.items()} | {"arrays.npz": b"\xff\x00\n\xfe"}


def command(*arguments):
    done = CliRunner().invoke(records.app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_files_come_back_as_they_were(tmp_path):
    for name in ("b", "a"):
        Record(CONTENT).write(tmp_path / "runs" / name)
    command("pack", tmp_path)
    assert not list((tmp_path / "runs").iterdir())
    first, second = (tmp_path / records.FILE).read_text().splitlines()
    assert json.loads(first)["case"] == "a"
    assert json.loads(first)["files"]["config.json"]["name"] == "ö"
    assert json.loads(second)["files"]["metrics.jsonl"][0] == {"step": 1, "loss": 0.1}
    assert "samples.txt 18" in command("list", tmp_path)
    packed = (tmp_path / records.FILE).read_bytes()

    command("unpack", tmp_path)
    for name in ("a", "b"):
        folder = tmp_path / "runs" / name
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == CONTENT
    command("pack", tmp_path, tmp_path / "runs" / "b")
    assert (tmp_path / records.FILE).read_bytes() == packed

    (tmp_path / "runs" / "a" / "checkpoints").mkdir()
    done = CliRunner().invoke(records.app, ["pack", str(tmp_path)])
    assert done.exit_code == 2
    assert (tmp_path / records.FILE).read_bytes() == packed


def test_read_takes_any_form(tmp_path):
    records.put(tmp_path, {"a": Record(CONTENT)})
    record = records.read(tmp_path)["a"]
    assert record.read("other_form.json") == {"seed": 1}
    assert record.read("with_newline.json") == {"seed": 0}
    assert record.read("separator.jsonl") == [{"text": "\u2028"}]
    assert "arrays.npz" in record
    assert "nothing.json" not in record


def test_a_crash_leaves_the_old_records(tmp_path, monkeypatch):
    records.put(tmp_path, {"a": Record(CONTENT)})
    before = (tmp_path / records.FILE).read_bytes()
    monkeypatch.setattr("nrgpt.files.flush", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        records.put(tmp_path, {"b": Record(CONTENT)})
    assert [file.name for file in tmp_path.iterdir()] == [records.FILE]
    assert (tmp_path / records.FILE).read_bytes() == before


def test_writers_do_not_lose_each_others_records(tmp_path):
    """Threads lock each other out as processes do: each opens the folder for itself."""
    names = [f"{number:02}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: records.put(tmp_path, {name: Record(CONTENT)}), names))
    assert list(records.read(tmp_path)) == names


def test_a_damaged_record_is_named(tmp_path):
    records.put(tmp_path, {"a": Record(CONTENT)})
    with (tmp_path / records.FILE).open("a") as file:
        file.write('{"case": "b", "fi')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2: .* delete this line"):
        records.read(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        {"case": "../../outside", "files": {"a.txt": "x"}},
        {"case": "a", "files": {"../../outside.txt": "x"}},
        {"case": "/outside", "files": {}},
        {"case": "..", "files": {}},
        {"case": "a\0", "files": {}},
        {"case": "a", "files": {"x.odd": {}}},
        {"case": "a", "files": [1]},
        {"case": "a"},
        {"case": "a", "files": {}, "binary": {"x": "?"}},
    ],
)
def test_records_of_others_write_nothing_elsewhere(tmp_path, line):
    folder = tmp_path / "deep" / "records"
    folder.mkdir(parents=True)
    (folder / records.FILE).write_text(json.dumps(line) + "\n")
    done = CliRunner().invoke(records.app, ["unpack", str(folder)])
    assert isinstance(done.exception, ValueError)
    assert {path.name for path in tmp_path.rglob("*")} <= {"deep", "records", "runs", records.FILE}


def test_records_are_not_unpacked_through_links(tmp_path):
    record = {"case": "a", "files": {"a.txt": "theirs"}}
    (tmp_path / records.FILE).write_text(json.dumps(record) + "\n")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "a.txt").symlink_to(tmp_path / "mine")
    assert CliRunner().invoke(records.app, ["unpack", str(tmp_path)]).exception is not None
    assert (tmp_path / "mine").read_text() == "mine"
