"""The server as its clients see it: OpenAI's own, many at once, and some that behave badly."""

import asyncio
import http.client
import json
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlparse

import openai
import pytest

import nrgpt

from ..processes import patience, wait_for
from ..runs import run_cli
from .conftest import serving

REQUESTS = int(os.environ.get("NRGPT_TEST_REQUESTS", "300"))
"""For the test of leaks; 10,000 is its long form."""
NAME = "zoo:shakespeare_certified"


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=patience()) as made:
        yield made


@pytest.fixture(scope="module")
def model():
    return nrgpt.load(NAME, device="cpu")


def ask(address, method, path, body=b"", **headers):
    where = urlparse(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=patience())
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def health(address):
    return ask(address, "GET", "/health")[1]


def wait_until_idle(address):
    wait_for(lambda: not any(health(address)[k] for k in ("running", "waiting")), what="idleness")


def test_completions(client, model):
    assert [found.id for found in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    wanted = model.generate("ROMEO:", max_new_tokens=30, temperature=0)
    asked = {"model": NAME, "prompt": "ROMEO:", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == wanted
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 30
    assert whole.usage.prompt_tokens == 6
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == wanted
    assert chunks[-1].usage.total_tokens == 36
    assert len(chunks) > 10
    two = client.completions.create(**asked | {"prompt": ["ROMEO:", "O"], "n": 2, "echo": True})
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert two.choices[1].text == "ROMEO:" + wanted
    tokens = client.completions.create(**asked | {"prompt": model.encode("ROMEO:")})
    assert tokens.choices[0].text == wanted
    seeded = {"temperature": 1.0, "seed": 3, "top_p": 0.9}
    a, b = (client.completions.create(**asked | seeded).choices[0].text for _ in range(2))
    assert a == b != wanted


def test_stop_strings(client, model):
    wanted = model.generate("ROMEO:", max_new_tokens=60, temperature=0)
    stop = wanted[20:24]
    before = wanted[: wanted.find(stop)]
    asked = {"model": NAME, "prompt": "ROMEO:", "max_tokens": 60, "temperature": 0, "stop": [stop]}
    whole = client.completions.create(**asked).choices[0]
    assert (whole.text, whole.finish_reason) == (before, "stop")
    chunks = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert "".join(c.text for c in chunks) == before
    assert chunks[-1].finish_reason == "stop"


def test_logprobs_and_energies(client, model):
    asked = {"model": NAME, "prompt": "ROMEO:", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    ours = {"steps": 5, "energies": True}
    for stream in (False, True):
        found = client.completions.create(**asked, echo=True, extra_body=ours, stream=stream)
        choices = [c.choices[0] for c in found] if stream else found.choices
        text = "".join(choice.text for choice in choices)
        energies = [e["total"] for choice in choices for e in choice.energies]
        wanted = model.energies(text, steps=5)["total"].tolist()
        assert energies == pytest.approx(wanted, abs=0.01)
        logprobs = [x for choice in choices for x in choice.logprobs.token_logprobs]
        loss = model.trajectory(text, steps=5).loss[-1, 0, :-1].tolist()
        assert logprobs[0] is None
        assert [-x for x in logprobs[1:]] == pytest.approx(loss, abs=1e-3)
        tokens = [x for choice in choices for x in choice.logprobs.tokens]
        assert "".join(tokens) == text
    adaptive = {"adaptive": {"rule": "kl", "tolerance": 1e-4}}
    found = client.completions.create(**asked, extra_body=adaptive).choices[0]
    assert all(1 <= steps <= 8 for steps in found.steps)
    assert len(found.steps) == 8


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": "é"}, "'é' at position 0 is not in this vocabulary"),
        ({"prompt": "a" * 257}, "257 tokens; this model's context is 256"),
        ({"prompt": [70]}, "tokens must be in 0 .. 64"),
        ({"prompt": []}, "must hold at least one text"),
        ({"max_tokens": 10**6}, "max_tokens = 1000000: must be at most 2048 here"),
        ({"n": 65}, "n = 65: must be at most 64 here"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"presence_penalty": 1.5}, "presence_penalty"),
        ({"extra_body": {"step": 3}}, "step: Extra inputs are not permitted"),
        ({"extra_body": {"steps": 257}}, "steps = 257: must be at most 256"),
        ({"extra_body": {"adaptive": {"rule": "x"}}}, "adaptive"),
    ],
)
def test_mistakes_are_named(client, wrong, said):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": NAME, "prompt": "O", **wrong})
    assert said in refused.value.message


def test_whatever_comes_over_the_wire(address):
    for body, status, said in (
        (b"{", 400, "this is not JSON"),
        (b"\xff\xfe", 400, ""),
        (b"[]", 400, ""),
        (b'{"prompt": 3}', 400, "prompt"),
        (b" " * (2 << 20), 413, "longer than 1,048,576 bytes"),
    ):
        found, answer = ask(
            address, "POST", "/v1/completions", body, **{"Content-Type": "application/json"}
        )
        assert found == status, (body[:20], answer)
        assert said in answer["error"]["message"]
    assert ask(address, "POST", "/v1/chat/completions", b"{}")[0] == 404
    other = json.dumps({"model": "other", "prompt": "O"}).encode()
    headers = {"Content-Type": "application/json"}
    assert ask(address, "POST", "/v1/completions", other, **headers)[0] == 404

    def endless():
        for _ in range(64):
            yield b" " * (1 << 16)

    where = urlparse(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=patience())
    try:
        connection.request("POST", "/v1/completions", endless(), headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # closed while we were still talking
    finally:
        connection.close()
    with socket.create_connection((where.hostname, where.port)) as silent:
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert health(address)["status"] == "ok"


def test_many_at_once_and_some_that_leave(address, model):
    """64 clients: most get what they would get alone, some leave, one reads nothing."""
    prompts = [f"ROMEO:{'O' * (i % 9)}" for i in range(64)]
    wanted = {p: model.generate(p, max_new_tokens=20 + len(p), temperature=0) for p in set(prompts)}

    async def one(client, number):
        prompt = prompts[number]
        asked = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 20 + len(prompt)}
        if number % 8 == 1:  # leaves in the middle of a stream
            stream = await client.completions.create(**asked | {"max_tokens": 2000}, stream=True)
            async for _ in stream:
                break
            await stream.close()
        elif number % 8 == 2:  # leaves while it waits
            waiting = client.completions.create(**asked | {"max_tokens": 2000})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.3)
        else:
            found = await client.completions.create(**asked)
            assert found.choices[0].text == wanted[prompt]

    async def all_of_them():
        options = {"base_url": address, "api_key": "none", "max_retries": 0, "timeout": patience()}
        async with openai.AsyncOpenAI(**options) as client:
            await asyncio.gather(*(one(client, number) for number in range(64)))

    where = urlparse(address)
    body = json.dumps({"prompt": "O", "max_tokens": 2000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((where.hostname, where.port)) as deaf:
        deaf.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        run_apart(all_of_them())
    wait_until_idle(address)


def run_apart(coroutine):
    """In a thread: a browser that another test keeps open has an event loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def resources(pid):
    """Megabytes in memory, open files, threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes, threads = (
        int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads")
    )
    return kilobytes / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_nothing_leaks(model):
    """Short requests of all kinds, over and over: memory and open files stay as they were."""

    async def one(client, number):
        asked = {"model": NAME, "prompt": "ROMEO:", "max_tokens": 1 + number % 4}
        if number % 10 == 0:
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**asked | {"prompt": "é"})
        elif number % 10 == 1:
            async with await client.completions.create(
                **asked | {"max_tokens": 9}, stream=True
            ) as leaving:
                async for _ in leaving:
                    break
        elif number % 10 == 2:
            ours = {"energies": True, "steps": 1 + number % 3}
            await client.completions.create(**asked, extra_body=ours, logprobs=1)
        elif number % 2:
            await client.completions.create(**asked)
        else:
            async with await client.completions.create(**asked, stream=True) as stream:
                assert [chunk async for chunk in stream]

    async def many(address, count):
        options = {"base_url": address, "api_key": "none", "max_retries": 0, "timeout": patience()}
        async with openai.AsyncOpenAI(**options) as client:
            for start in range(0, count, 32):
                await asyncio.gather(*(one(client, start + i) for i in range(32)))

    with serving() as (address, process):
        run_apart(many(address, 128))
        wait_until_idle(address)
        before = resources(process.pid)
        run_apart(many(address, REQUESTS))
        wait_until_idle(address)
        after = resources(process.pid)
    print(f"{REQUESTS} requests: MB, files and threads {before} -> {after}")
    assert after[0] - before[0] < 40
    assert after[1] <= before[1] + 4
    assert after[2] <= before[2] + 2


def test_a_key_is_needed_where_others_can_come(address):
    said = run_cli("serve", NAME, "--host", "0.0.0.0", code=2).stderr
    assert "--host 0.0.0.0: others can reach it; choose a key" in said
    with serving("--host", "0.0.0.0", "--waiting", "1", NRGPT_API_KEY="secret") as (where, process):
        where = where.replace("0.0.0.0", "127.0.0.1")
        assert ask(where, "GET", "/health")[0] == 200
        assert ask(where, "GET", "/v1/models")[0] == 401
        assert ask(where, "GET", "/v1/models", Authorization="Bearer wrong")[0] == 401
        with openai.OpenAI(base_url=where, api_key="secret", max_retries=0) as client:
            assert len(list(client.models.list())) == 1
            with pytest.raises(openai.RateLimitError, match="waiting already"):
                client.completions.create(model=NAME, prompt=["O"] * 3)
        process.terminate()
        assert process.wait(patience()) in (0, -15)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ('"n": 1000000000', "n = 1000000000: must be at most 64"),
        ('"temperature": NaN', "temperature: "),
        ('"top_p": NaN', "top_p: "),
        ('"repetition_penalty": Infinity', "repetition_penalty: "),
        ('"adaptive": {"tolerance": NaN}', "adaptive: "),
        ('"adaptive": {"patience": 1' + "0" * 40 + "}", "adaptive: "),
        ('"stop": ' + "[" * 100_000, "error parsing the body"),
    ],
)
def test_numbers_beyond_sense(address, asked, said):
    body = f'{{"prompt": "O", "max_tokens": 2, {asked}}}'.encode()
    status, answer = ask(
        address, "POST", "/v1/completions", body, **{"Content-Type": "application/json"}
    )
    assert status == 400
    assert said in answer["error"]["message"]
    assert health(address)["status"] == "ok"
