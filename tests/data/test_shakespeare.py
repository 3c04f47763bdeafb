"""The Shakespeare characters: found, downloaded, checked."""

import hashlib
import http.server
import threading

import pytest

from nrgpt.data import shakespeare
from nrgpt.data.shakespeare import prepare_shakespeare
from nrgpt.data.shards import DataError, Dataset

POEM = "Shall I compare thee\nto a summer's day?\n" * 9


def test_shakespeare_is_split_as_in_nanogpt(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    prepare_shakespeare(tmp_path / "a", source=tmp_path / "poem.txt")
    dataset = Dataset.open(tmp_path / "a")
    train, val = dataset.tokens("train"), dataset.tokens("val")
    assert dataset.tokenizer.decode([*range(dataset.vocab_size)]) == "".join(sorted(set(POEM)))
    assert dataset.tokenizer.decode(train.read(0, len(train))) == POEM[: int(len(POEM) * 0.9)]
    assert dataset.tokenizer.decode(val.read(0, len(val))) == POEM[int(len(POEM) * 0.9) :]
    assert dataset.manifest["source"]["sha256"] == hashlib.sha256(POEM.encode()).hexdigest()


def test_shakespeare_from_the_environment_must_be_the_real_one(monkeypatch, tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    monkeypatch.setenv("NRGPT_SHAKESPEARE", str(tmp_path / "poem.txt"))
    with pytest.raises(DataError, match=r"NRGPT_SHAKESPEARE = .*poem\.txt: its sha256 is"):
        prepare_shakespeare(tmp_path / "a")
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(POEM.encode()).hexdigest())
    prepare_shakespeare(tmp_path / "a")
    assert Dataset.open(tmp_path / "a").vocab_size == len(set(POEM))
    monkeypatch.setenv("NRGPT_SHAKESPEARE", str(tmp_path / "nowhere.txt"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        prepare_shakespeare(tmp_path / "b")


def test_shakespeare_is_downloaded_and_checked(monkeypatch, tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(POEM) + (9 if "cut" in self.path else 0)))
            self.end_headers()
            self.wfile.write(POEM.encode())

        def log_message(self, *arguments):
            pass

    monkeypatch.delenv("NRGPT_SHAKESPEARE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(shakespeare, "URL", f"{address}/whole")
        with pytest.raises(DataError, match="whole: its sha256 is"):
            prepare_shakespeare(tmp_path / "a")
        monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(POEM.encode()).hexdigest())
        prepare_shakespeare(tmp_path / "a")
        monkeypatch.setattr(shakespeare, "URL", f"{address}/cut")
        with pytest.raises(FileNotFoundError, match=r"IncompleteRead.*set NRGPT_SHAKESPEARE"):
            prepare_shakespeare(tmp_path / "b")
        server.shutdown()
    assert Dataset.open(tmp_path / "a").vocab_size == len(set(POEM))
    with pytest.raises(FileNotFoundError, match=r"could not be downloaded .*put the file"):
        prepare_shakespeare(tmp_path / "b")
