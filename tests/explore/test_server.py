"""The local server: it answers what the page asks, and nobody else."""

import json
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from nrgpt import zoo
from nrgpt.cli import app
from nrgpt.cli.commands import explore as command
from nrgpt.dynamics.answers import Answers
from nrgpt.explore import models
from nrgpt.train.runs import load_run
from tests.processes import patience

from .test_page import Shown

NAME = "listops_30_steps"
AS_TRAINED = {"steps": None, "rate": 1, "beta": 1, "temperature": 0, "cone": None, "word": "",
              "weight": 0}  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    """With a model that is said to be too large for the page."""
    monkeypatch.setattr(models, "is_small_enough", lambda model: False)
    run = load_run(zoo.folder(NAME))
    server = command.server_of([run], {run.folder: NAME}, None, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(patience())


def ask(server, method, path, body=None, **headers):
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=patience())
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def question(server, what, **body):
    headers = {"X-NRGPT-Key": server.key}
    status, found = ask(server, "POST", f"/{what}", json.dumps({"model": NAME, **body}), **headers)
    return status, json.loads(found)


def test_the_page_needs_the_key(server):
    address = urlsplit(server.address)
    assert address.hostname == "127.0.0.1"
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "GET", f"/?{address.query}")[0] == 200
    assert ask(server, "GET", "/?key=wrong")[0] == 403
    assert ask(server, "GET", "/")[0] == 403
    assert ask(server, "GET", "/etc/passwd")[0] == 404
    elsewhere = {"Host": "example.org"}
    assert ask(server, "GET", f"/?{address.query}", **elsewhere)[0] == 403


def test_questions_need_the_key_and_sense(server):
    assert ask(server, "POST", "/roll", "{}")[0] == 403
    key = {"X-NRGPT-Key": server.key}
    assert ask(server, "POST", "/roll", "not json", **key)[0] == 400
    assert ask(server, "POST", "/roll", "[]", **key)[0] == 400
    assert ask(server, "POST", "/nothing", "{}", **key)[0] == 404
    too_long = {"Content-Length": str(2 << 20), **key}  # it is not waited for
    assert ask(server, "POST", "/roll", "x", **too_long)[0] == 400
    for body in (
        {"tokens": [99], "settings": AS_TRAINED},
        {"tokens": [], "settings": AS_TRAINED},
        {"tokens": [1], "settings": AS_TRAINED | {"rate": -1}},
        {"tokens": [1], "settings": AS_TRAINED | {"steps": 10**9}},
        {"tokens": "abc", "settings": AS_TRAINED},
        {"tokens": [1]},
    ):
        status, found = question(server, "roll", **body)
        assert status == 400
        assert found["error"]


def test_questions_that_would_break_it(server, monkeypatch):
    """The connection gets an answer, and the next one too."""
    key = {"X-NRGPT-Key": server.key}
    assert ask(server, "POST", "/roll", "[" * 100_000, **key)[0] == 400
    assert ask(server, "POST", "/roll", "{}", **{"Content-Length": "9" * 5000, **key})[0] == 400
    settings = {"tokens": [1], "settings": AS_TRAINED | {"word": "\ud800"}}
    assert question(server, "roll", **settings)[0] == 400
    monkeypatch.setitem(server.answers, "roll", lambda body: [].pop())
    status, found = question(server, "roll", tokens=[1], settings=AS_TRAINED)
    assert status == 500
    assert found["error"] == "pop from empty list"
    monkeypatch.undo()
    assert question(server, "read", text="max(4")[0] == 200


def test_answers(server):
    assert question(server, "read", text="max(4")[1]["tokens"] == [5, 1, 11]
    status, found = question(server, "read", text="max(?, 12, 4 日本")
    assert (status, found["tokens"]) == (200, [5, 1, 11])  # as the page itself reads it
    assert found["unknown"] == ["?", "12", "日", "本"]
    settings = AS_TRAINED | {"word": "max", "weight": 0.5, "steps": 5}
    rolled = question(server, "roll", tokens=[5, 1, 11], settings=settings)[1]
    assert len(rolled["curves"]["own energy"]) == 6
    looks = question(server, "attention", tokens=[5, 1, 11], settings=settings, token=2)[1]["heads"]
    assert [len(looks), len(looks[0]), len(looks[0][0])] == [6, 4, 2]  # strict: not at itself
    assert question(server, "next", tokens=[5, 1, 11], settings=settings)[1]["token"] in range(17)


def test_unknown_characters_are_left_out():
    run = load_run(zoo.folder("shakespeare_certified"))
    found = Answers(run.model, run.tokenizer, run.encode).read({"text": "To be 🙂 שלום"})
    assert run.decode(found["tokens"]) == "To be  "
    assert found["unknown"] == ["🙂", *"שלום"]


def test_the_page_of_a_large_model(server, chromium):
    with Shown(chromium, server.address, offline=False, requests=server.address[:22]) as shown:
        assert shown.run("panels[0].source.constructor.name") == "Remote"
        shown.until("document.querySelectorAll('#attention rect').length > 4")
        assert shown.run("panels[0].record.curves.angle.length") == 31
        shown.run("change(panels[0], { steps: 12 })")
        shown.until("panels[0].record.steps === 12 && computing === 0")
        shown.write("max(?,4) = 🙂")
        assert "does not know them: ? 🙂" in shown.page.inner_text("#notice")
        shown.page.click("#generate")
        shown.until("panels[0].record.tokens.length > 5")
        shown.run("stop()")


def test_a_server_that_has_ended(server, chromium):
    """The page says so."""
    with Shown(chromium, server.address, offline=False, requests=server.address[:22]) as shown:
        shown.until("document.querySelectorAll('#attention rect').length > 4")
        shown.context.set_offline(True)
        shown.page.click("#generate")
        shown.until("!isGenerating")
        assert "is it still running?" in shown.page.inner_text("#notice")
        shown.complaints[:] = [c for c in shown.complaints if "ERR_INTERNET_DISCONNECTED" not in c]


def test_examples_are_texts_that_the_model_knows():
    """One knows no min, the other no sum."""
    shown = {}
    for name in (NAME, "listops_settled"):
        run = load_run(zoo.folder(name))
        shown[name] = command.told(run, name, None)["examples"]
    assert all("min" not in text for text in shown[NAME])
    assert all("sum" not in text for text in shown["listops_settled"])
    assert min(map(len, shown.values())) == 2


def test_a_file_cannot_hold_it(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "is_small_enough", lambda model: False)
    for words, said in (
        (["--to", "x.html"], "leave out --to, and Python computes it"),
        (["--to", "x.txt"], "must be an .html file"),
        (["zoo:nothing"], "the zoo has no model"),
    ):
        result = CliRunner().invoke(app, ["explore", *words])
        assert result.exit_code == 2
        assert said in result.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_the_commands(tmp_path):
    result = CliRunner().invoke(app, ["explore", f"zoo:{NAME}", "--to", "a/page.html"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a" / "page.html").stat().st_size > 100_000
    words = ["landscape", f"zoo:{NAME}", "--text", "max(4,2) =", "--starts", "2", "--to", "here"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "minimum 1" in result.output
    assert {"map.png", "map.pdf", "index.html"} <= {
        path.name for path in (tmp_path / "here").iterdir()
    }
    result = CliRunner().invoke(app, [*words, "--token", "99"])
    assert result.exit_code == 2
    assert "must be in 1 .. 6" in result.output
    words = ["landscape", "zoo:listops_rgpt_parallel", "--to", "nowhere"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert not (tmp_path / "nowhere").exists()
