"""The server under load, as OpenAI's client sees it: python -m experiments.serving.load [REQUESTS]

Two measurements in one run, written to load.json. First what a token costs, in seconds of a core
(so that other work on the machine does not count): `model.generate` of 64 texts, and the server
with a client for each of them. Then so many requests of all kinds from 64 clients: is anything
kept?
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import torch

import nrgpt
from nrgpt.train.report import environment

MODEL = "zoo:shakespeare_certified"
CLIENTS, TOKENS, ROUNDS = 64, 32, 5
PROMPTS = [f"ROMEO:{'O' * (i % 8)}" for i in range(CLIENTS)]


@contextmanager
def serving() -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "nrgpt", "serve", MODEL, "--port", "0", "--device", "cpu"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            lines = (line.split() for line in process.stdout)
            address = next(words[2] for words in lines if words[:1] == ["serving"])
            yield address, psutil.Process(process.pid)
        finally:
            process.terminate()


def core_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def kept(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        mb = round(process.memory_info().rss / 2**20, 1)
        return {"MB": mb, "files": process.num_fds(), "threads": process.num_threads()}


async def whole(client: Any, prompt: str, **more: Any) -> None:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    await client.completions.create(**asked | more)


async def streamed(client: Any, prompt: str, **more: Any) -> None:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    async with await client.completions.create(**asked | more, stream=True) as stream:
        async for _ in stream:
            pass


async def leaves(client: Any, prompt: str) -> None:
    """In the middle of a stream."""
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 2000}
    async with await client.completions.create(**asked, stream=True) as stream:
        async for _ in stream:
            return


async def gives_up(client: Any, prompt: str) -> None:
    """While it waits for a whole answer."""
    try:
        await asyncio.wait_for(whole(client, prompt, max_tokens=2000), 0.3)
    except TimeoutError:
        return


async def reads_slowly(client: Any, prompt: str) -> None:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
    async with await client.completions.create(**asked, stream=True) as stream:
        async for _ in stream:
            await asyncio.sleep(0.05)


async def wrong(client: Any, prompt: str) -> None:
    try:
        await whole(client, prompt + "\u00e9")
    except openai.BadRequestError:
        return
    raise AssertionError("a character that the model does not know was taken")


async def with_energies(client: Any, prompt: str) -> None:
    ours = {"energies": True, "steps": 4}
    await whole(client, prompt, max_tokens=4, logprobs=1, extra_body=ours)


async def short(client: Any, prompt: str) -> None:
    await whole(client, prompt, max_tokens=2)


KINDS = [
    *[short] * 50, *[streamed] * 20, *[with_energies] * 10, *[wrong] * 8, *[leaves] * 5,
    *[reads_slowly] * 5, *[gives_up] * 2,
]  # fmt: skip


async def cost(address: str, process: psutil.Process) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    model = nrgpt.load(MODEL, device="cpu")
    texts = [model.encode(prompt) for prompt in PROMPTS]
    found: dict[str, list[float]] = {"model.generate": [], "HTTP": [], "HTTP, streamed": []}
    async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=600) as client:
        for count in range(ROUNDS + 1):
            began = time.process_time()
            model.model.generate(texts, max_new_tokens=TOKENS)
            row = {"model.generate": time.process_time() - began}
            for name, ask in (("HTTP", whole), ("HTTP, streamed", streamed)):
                began = core_seconds(process)
                await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
                row[name] = core_seconds(process) - began
            for name, seconds in row.items():
                found[name] += [seconds] if count else []  # the first is for warming up
    return found


async def many(address: str, count: int) -> Counter[str]:
    done: Counter[str] = Counter()
    numbers = iter(range(count))
    options: dict[str, Any] = {"base_url": address, "api_key": "none", "timeout": 600}
    async with openai.AsyncOpenAI(**options, max_retries=0) as client:

        async def one_client() -> None:
            for number in numbers:
                ask = KINDS[(number * 37) % len(KINDS)]
                await ask(client, PROMPTS[number % CLIENTS])
                done[ask.__name__] += 1

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
        await asyncio.sleep(2)
    return done


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with serving() as (address, process):
        seconds = asyncio.run(cost(address, process))
        asyncio.run(many(address, 200))
        before = kept(process)
        done = asyncio.run(many(address, requests))
        after = kept(process)
    tokens = CLIENTS * TOKENS
    milliseconds = {
        name: {
            "median": round(1e3 * statistics.median(each) / tokens, 4),
            "all": [round(1e3 * one / tokens, 4) for one in each],
        }
        for name, each in seconds.items()
    }
    record = {
        "model": MODEL, "clients": CLIENTS, "new_tokens": TOKENS, "core_ms_per_token": milliseconds,
        "requests": dict(done), "before": before, "after": after, "machine": environment(),
    }  # fmt: skip
    text = json.dumps(record, indent=1) + "\n"
    Path(__file__).with_name("load.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
