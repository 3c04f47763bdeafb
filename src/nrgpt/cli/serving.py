"""nrgpt serve, chat."""

import ipaddress
import socket
from typing import Annotated, Any

from typer import Argument, Option

from ..extras import need
from ..text_model import load
from .chat import Chat
from .common import Checkpoint, Device, Seed, Steps, app

KEY = "NRGPT_API_KEY"
Model = Annotated[str, Argument(help="A run folder, zoo:NAME, or an export.", metavar="RUN")]


@app.command()
def serve(
    run: Model,
    host: Annotated[str, Option(help="Address to listen at; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65_535, help="0: any free one.")] = 8000,
    key: Annotated[str | None, Option(help="API key that clients must send.", envvar=KEY)] = None,
    running: Annotated[int, Option(min=1, help="Texts computed together.")] = 64,
    waiting: Annotated[int, Option(min=1, help="Texts that may wait.")] = 256,
    max_tokens: Annotated[int, Option(min=1, help="Most new tokens of a text.")] = 2048,
    max_steps: Annotated[int, Option(min=1, help="Most inference steps.")] = 256,
    seconds: Annotated[float, Option(min=1, help="Most time for a request.")] = 300,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Serve a model over HTTP, as OpenAI's completions: /v1/completions, /v1/models, /health.

    Requests may also set steps, adaptive, energies, top_k and repetition_penalty.
    """
    if key is None and not is_this_machine(host):
        raise ValueError(
            f"--host {host}: others can reach it; choose a key, with --key or in {KEY}"
        )
    if key is not None and not key.strip():
        raise ValueError("--key: an empty key keeps nobody out; choose one, or leave it out")
    need("fastapi", "nrgpt serve", "serve")
    uvicorn = need("uvicorn", "nrgpt serve", "serve")
    from ..serve.app import Limits, make_app

    listener = listening(host, port)  # an error now, not after the model was loaded
    model = load(run, checkpoint=checkpoint, device=device)
    limits = Limits(
        running=running, waiting=waiting, tokens=max_tokens, steps=max_steps, seconds=seconds
    )
    made = make_app(model, limits=limits, key=key)
    options = {"log_level": "warning", "timeout_graceful_shutdown": 5, "timeout_keep_alive": 75}

    class Server(uvicorn.Server):  # type: ignore[name-defined]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            address = self.servers[0].sockets[0].getsockname()
            name = f"[{address[0]}]" if ":" in address[0] else address[0]
            print(f"{model!r}", flush=True)
            print(f"serving at http://{name}:{address[1]}/v1 (Ctrl-C ends it)", flush=True)

    Server(uvicorn.Config(made, host=host, port=port, **options)).run(sockets=[listener])


def listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: {error.strerror}; choose another (0 is any free port)"
        ) from error


def is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@app.command()
def chat(
    run: Model,
    tokens: Annotated[int, Option(help="New tokens for each of your lines.")] = 200,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.8,
    top_p: Annotated[float | None, Option(help="Only the likeliest tokens.")] = None,
    energies: Annotated[bool, Option(help="Colour each token by its energy.")] = True,
    seed: Seed = 0,
    steps: Steps = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Write with a model, in turns: it continues what you have both written so far.

    Each token has the colour of its energy: blue is low, red is high, for this text. Ctrl-C stops
    the model, Ctrl-D ends the chat. /energies shows numbers, /new begins another text.
    """
    model = load(run, checkpoint=checkpoint, device=device)
    options = {
        "tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "steps": steps,
    }  # fmt: skip
    Chat(model, energies and model.model.cfg.block == "nrgpt", options).talk()
