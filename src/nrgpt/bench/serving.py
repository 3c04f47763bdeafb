"""The server beside `model.generate`, with the same texts in one run."""

import http.client
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlparse

import torch

from ..decode.generate import Sampling
from ..serve.engine import Engine, Event, Job, Token, Way
from ..text_model import TextModel, load
from .measure import Report, Work, compare

MODEL = "zoo:shakespeare_certified"
TOKENS = 32
"""New ones for each text."""
LONGEST_START = 300
"""Seconds that the server may take to say where it is."""


def serve(device: torch.device, *, compile: bool) -> list[Report]:
    """The same texts by `model.generate`, by the engine, and over HTTP, each text by a client."""
    model = load(MODEL, device=device.type)
    engine = Engine(model.model).start()
    reports = []
    try:
        with server(device) as address:
            for clients in (1, 64):
                prompts = [f"ROMEO:{'O' * (i % 8)}" for i in range(clients)]
                texts = [model.encode(prompt) for prompt in prompts]
                with (
                    over_http(address, prompts, stream=False) as whole,
                    over_http(address, prompts, stream=True) as streamed,
                ):
                    works = {
                        "model.generate": generating(model, texts),
                        "engine": engine_work(engine, texts),
                        "HTTP": whole,
                        "HTTP, streamed": streamed,
                    }
                    timed = {name: Work(call, TOKENS * clients) for name, call in works.items()}
                    title = f"{MODEL}, {clients} clients, {TOKENS} new tokens each, greedy"
                    reports.append(compare("serve", title, timed, device))
    finally:
        engine.stop()
    return reports


def generating(model: TextModel, texts: list[list[int]]) -> Callable[[], object]:
    return lambda: model.model.generate(texts, max_new_tokens=TOKENS)


def engine_work(engine: Engine, texts: list[list[int]]) -> Callable[[], None]:
    steps = engine.model.cfg.steps

    def work() -> None:
        events: queue.Queue[Event] = queue.Queue()
        engine.submit(
            [Job(list(text), TOKENS, Way(steps), Sampling(), events.put) for text in texts]
        )
        left = len(texts)
        while left:
            left -= not isinstance(events.get(timeout=60), Token)

    return work


@contextmanager
def over_http(address: str, prompts: list[str], *, stream: bool) -> Iterator[Callable[[], None]]:
    """Each client has a thread and a connection, which it keeps."""
    where = urlparse(address)
    pool = ThreadPoolExecutor(len(prompts))
    connections = [
        http.client.HTTPConnection(str(where.hostname), where.port, timeout=60) for _ in prompts
    ]

    def ask(connection: http.client.HTTPConnection, prompt: str) -> None:
        asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        if answer.status != 200 or not answer.read():
            raise RuntimeError(f"the server answered {answer.status}")

    with pool:
        try:
            yield lambda: [*pool.map(ask, connections, prompts)].clear()
        finally:
            for connection in connections:
                connection.close()


@contextmanager
def server(device: torch.device) -> Iterator[str]:
    command = [sys.executable, "-m", "nrgpt", "serve", MODEL, "--port", "0"]
    command += ["--device", device.type]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        silent = threading.Timer(LONGEST_START, process.kill)  # then its output ends
        silent.start()
        try:
            lines = (line.split() for line in process.stdout)
            address = next((words[2] for words in lines if words[:1] == ["serving"]), None)
            silent.cancel()
            if address is None:
                raise RuntimeError("the server did not start")
            yield address
        finally:
            silent.cancel()
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
