"""A stream from the Hub goes on where it was. Local files of the same shape stand for the Hub."""

import pyarrow
import pyarrow.parquet
import pytest

from nrgpt.data import documents as reading
from nrgpt.data import position, text
from nrgpt.data.text import prepare_hub
from nrgpt.files import NotOurs

from .test_text import LETTERS, content, documents

OPTIONS = {"tokenizer": LETTERS, "validation": 0.2, "progress": False, "workers": 1}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Three files of 100 rows, in pieces of about 16 rows."""
    pytest.importorskip("datasets")
    monkeypatch.setattr(reading, "PIECE_CHARACTERS", 500)
    (tmp_path / "hub").mkdir()
    for i in range(3):
        table = pyarrow.table({"text": documents()[100 * i : 100 * i + 100]})
        pyarrow.parquet.write_table(table, tmp_path / f"hub/{i}.parquet", row_group_size=30)
    return str(tmp_path / "hub")


@pytest.fixture
def rows(monkeypatch):
    """The rows that were read of the stream."""
    read, row_documents = [], position.row_documents

    def noted(found, field):
        for one in row_documents(found, field):
            read.append(one.read)
            yield one

    monkeypatch.setattr(position, "row_documents", noted)
    return read


def killed_after(pieces, monkeypatch):
    """As if the process ended while a piece was tokenised."""
    made, tokenise = [], text.PieceMaker.tokenise

    def until(self, piece):
        made.append(piece.number)
        if len(made) > pieces:
            raise KeyboardInterrupt
        return tokenise(self, piece)

    monkeypatch.setattr(text.PieceMaker, "tokenise", until)


def interrupted(hub, folder, pieces, monkeypatch, **options):
    with monkeypatch.context() as patch:
        killed_after(pieces, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare_hub(hub, folder, **OPTIONS, **options)
    assert not folder.exists()


def test_a_killed_stream_goes_on_where_it_was(hub, rows, tmp_path, monkeypatch):
    prepare_hub(hub, tmp_path / "whole", **OPTIONS)
    assert rows == list(range(1, 301))
    interrupted(hub, tmp_path / "again", 9, monkeypatch)
    rows.clear()
    interrupted(hub, tmp_path / "again", 4, monkeypatch)
    assert rows[0] > 100
    rows.clear()
    prepare_hub(hub, tmp_path / "again", **OPTIONS)
    assert rows[0] > 150  # the first file is not looked at again
    assert rows == list(range(rows[0], 301))
    assert content(tmp_path / "again") == content(tmp_path / "whole")


@pytest.mark.parametrize("harm", ["a piece", "the journal", "other settings"])
def test_what_cannot_be_used_is_read_again(hub, rows, tmp_path, monkeypatch, harm):
    prepare_hub(hub, tmp_path / "whole", **OPTIONS)
    seed = {"seed": 1} if harm == "other settings" else {}
    interrupted(hub, tmp_path / "again", 9, monkeypatch, **seed)
    partial = tmp_path / "again.partial"
    if harm == "a piece":
        damaged = sorted(partial.glob("0*"))[3]
        damaged.write_bytes(damaged.read_bytes()[:-30])
    if harm == "the journal":
        lines = (partial / text.JOURNAL).read_bytes().splitlines(keepends=True)
        (partial / text.JOURNAL).write_bytes(b"".join(lines[:3]) + lines[3][:40])
    rows.clear()
    prepare_hub(hub, tmp_path / "again", **OPTIONS)
    assert (rows[0] == 1) == (harm == "other settings")
    assert rows[0] < 100
    assert content(tmp_path / "again") == content(tmp_path / "whole")


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"[1, [2]]\n", b"null"])
def test_a_journal_of_nonsense_is_begun_anew(hub, rows, tmp_path, content):
    (tmp_path / "again.partial").mkdir()
    (tmp_path / "again.partial" / text.JOURNAL).write_bytes(content)
    prepare_hub(hub, tmp_path / "again", **OPTIONS)
    assert rows == list(range(1, 301))


def test_a_journal_behind_a_link(hub, tmp_path):
    (tmp_path / "again.partial").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "again.partial" / text.JOURNAL).symlink_to(tmp_path / "mine")
    with pytest.raises(NotOurs):
        prepare_hub(hub, tmp_path / "again", **OPTIONS)
    assert (tmp_path / "mine").read_text() == "mine"
