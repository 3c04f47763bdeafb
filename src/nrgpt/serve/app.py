"""The routes, the limits and the streams of the server."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..decode.generate import Sampling
from ..text_model import TextModel
from .engine import Engine, Event, Failed, Finished, Job, Token, Way
from .protocol import Answer, CompletionRequest, Refused, Writer

Message = MutableMapping[str, Any]
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
LOOK_SECONDS = 0.5
"""How often to look whether a client that waits for a whole answer is still there."""


@dataclass(frozen=True)
class Limits:
    body: int = 1 << 20
    """Bytes of a request."""
    tokens: int = 2048
    """New tokens of a text."""
    choices: int = 64
    """Texts of one request."""
    steps: int = 256
    running: int = 64
    """Texts computed together."""
    waiting: int = 256
    """Texts that wait for their turn; further ones are refused."""
    seconds: float = 300
    """For a request, from its arrival to its last byte."""


def make_app(model: TextModel, *, limits: Limits | None = None, key: str | None = None) -> FastAPI:
    model.model.check_continues("nrgpt serve")
    limits = limits or Limits()
    engine = Engine(model.model, rows=limits.running, waiting=limits.waiting)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()

    app = FastAPI(title=f"nrgpt: {model.name}", lifespan=life)
    app.state.engine = engine
    app.add_middleware(Guard, limit=limits.body, key=key, seconds=limits.seconds)
    app.add_exception_handler(Refused, on_refused)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    created = int(time.time())

    @app.get("/health")
    def health() -> Response:
        state = {"status": "ok" if engine.is_alive else "stopped", "running": engine.running}
        state |= {"waiting": len(engine.queue), "done": engine.done}
        return JSONResponse(state, 200 if engine.is_alive else 503)

    def about() -> dict[str, Any]:
        cfg = model.model.cfg
        return {
            "id": model.name, "object": "model", "created": created, "owned_by": "nrgpt",
            "block": cfg.block, "context": cfg.context, "steps": cfg.steps,
        }  # fmt: skip

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [about()]}

    @app.get("/v1/models/{name:path}")
    def one_model(name: str) -> dict[str, Any]:
        check_name(name, model)
        return about()

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        return await Completion(asked, model, engine, limits).respond(http)

    @app.post("/v1/chat/completions")
    def chat() -> None:
        raise Refused(404, "this model continues texts and knows no chat: use /v1/completions")

    return app


def check_name(name: str | None, model: TextModel) -> None:
    if name not in (None, "", model.name):
        raise Refused(404, f"model = {name!r}: this server has {model.name!r}", "model")


class Completion:
    """One request: its jobs in the engine, and the texts that come of them."""

    def __init__(self, asked: CompletionRequest, model: TextModel, engine: Engine, limits: Limits):
        self.asked, self.model, self.engine, self.limits = asked, model, engine, limits
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.deadline = time.monotonic() + limits.seconds
        given = asked.prompts(model)
        self.check(len(given) * (asked.n or 1))  # before so many are made
        prompts = [p for p in given for _ in range(asked.n or 1)]
        echo = bool(asked.echo)
        self.writers = [
            Writer(model, i, prompt, echo, asked.stops()) for i, prompt in enumerate(prompts)
        ]
        self.jobs = [self.job(i, prompt) for i, prompt in enumerate(prompts)]
        self.answer = Answer(model.name, sum(map(len, prompts)) // (asked.n or 1))

    def check(self, choices: int) -> None:
        asked, limits, cfg = self.asked, self.limits, self.model.model.cfg
        check_name(asked.model, self.model)
        for name, value, most in (
            ("n", choices, limits.choices),
            ("max_tokens", asked.max_tokens, limits.tokens),
            ("steps", asked.steps, limits.steps),
        ):
            if value is not None and value > most:
                raise Refused(400, f"{name} = {value}: must be at most {most} here", name)
        if cfg.block != "nrgpt" and (asked.energies or asked.adaptive):
            name = "energies" if asked.energies else "adaptive"
            raise Refused(400, f"{name}: block = {cfg.block!r} has no energy", name)
        if asked.energies and asked.adaptive:
            raise Refused(400, "energies: cannot be had with adaptive; ask twice", "energies")
        try:
            self.model.model.check_steps(asked.steps)
        except ValueError as error:
            raise Refused(400, str(error), "steps") from error

    def job(self, index: int, prompt: list[int]) -> Job:
        asked = self.asked
        heat = 1.0 if asked.temperature is None else asked.temperature
        top_p = None if asked.top_p == 1 else asked.top_p
        stop = asked.adaptive.stop() if asked.adaptive else None
        end = self.model.tokenizer.end_of_text

        def send(event: Event) -> None:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

        return Job(
            text=list(prompt),
            most=16 if asked.max_tokens is None else asked.max_tokens,
            way=Way(asked.steps or self.model.model.cfg.steps, stop, asked.energies),
            sampling=Sampling(asked.repetition_penalty, heat, asked.top_k, top_p),
            send=send,
            seed=None if asked.seed is None else asked.seed + index,
            ends=frozenset() if end is None else frozenset({end}),
            logprobs=asked.logprobs,
            echo=bool(asked.echo),
            deadline=self.deadline,
        )

    async def respond(self, http: Request) -> Response:
        try:
            self.engine.submit(self.jobs)
        except BufferError as error:
            raise Refused(429, f"{error}; try again in a moment") from error
        except RuntimeError as error:
            raise Refused(503, str(error)) from error
        if self.asked.stream:
            return StreamingResponse(self.stream(), media_type="text/event-stream")
        watch = asyncio.create_task(self.leave_with(http))
        try:
            async for _ in self.told():
                pass
        finally:
            watch.cancel()
            self.engine.cancel(self.jobs)
        choices = [writer.choice(self.asked) for writer in self.writers]
        return JSONResponse(self.answer.whole(choices, self.new_tokens()))

    async def leave_with(self, http: Request) -> None:
        """Nobody needs the answer when the client is gone."""
        while not await http.is_disconnected():
            await asyncio.sleep(LOOK_SECONDS)
        for index in range(len(self.jobs)):
            self.events.put_nowait((index, Failed("the client is gone", 499)))

    async def stream(self) -> AsyncIterator[str]:
        try:
            async for changed in self.told():
                choices = [self.writers[index].choice(self.asked) for index in sorted(changed)]
                choices = [c for c in choices if any(c[key] for key in c if key != "index")]
                if choices:
                    yield self.answer.chunk(choices)
            if self.asked.stream_options and self.asked.stream_options.include_usage:
                yield self.answer.chunk([], usage=self.answer.usage(self.new_tokens()))
            yield "data: [DONE]\n\n"
        except Refused as error:
            yield f"data: {error_body(error).decode()}\n\n"
        finally:
            self.engine.cancel(self.jobs)

    async def told(self) -> AsyncIterator[set[int]]:
        """Take what the engine sends into the writers; yields which of them have changed."""
        going = set(range(len(self.writers)))
        while going:
            waiting = [await self.events.get()]
            while not self.events.empty():  # a slow reader gets several tokens at once
                waiting.append(self.events.get_nowait())
            changed = set()
            for index, event in waiting:
                if index not in going:
                    continue
                changed.add(index)
                writer = self.writers[index]
                if isinstance(event, Failed):
                    raise Refused(event.status, event.message)
                if isinstance(event, Token):
                    writer.add(event)
                elif isinstance(event, Finished):
                    writer.reason = writer.reason or event.reason
                if writer.reason:
                    going.discard(index)
                    self.engine.cancel([self.jobs[index]])
            yield changed

    def new_tokens(self) -> int:
        return sum(len(writer.numbers) - writer.echoed for writer in self.writers)


def error_body(error: Refused) -> bytes:
    kind = KINDS.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    said = {"message": error.message, "type": kind, "param": error.param, "code": None}
    return bytes(JSONResponse({"error": said}).body)


async def on_refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    again = {"Retry-After": "1"} if error.status == 429 else {}
    return Response(error_body(error), error.status, again, "application/json")


async def on_invalid(http: Request, error: Exception) -> Response:
    """In OpenAI's form, with the field and what is wrong with it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:2])
    what = f"{field}: {first['msg']}" if first["type"] != "json_invalid" else "this is not JSON"
    return await on_refused(http, Refused(400, what, field or None))


async def on_http(http: Request, error: Exception) -> Response:
    """What FastAPI itself refuses, such as thousands of brackets, in the same form."""
    assert isinstance(error, HTTPException)
    return await on_refused(http, Refused(error.status_code, str(error.detail)))


class TooMuch(Exception):
    """The body is longer than allowed."""


class Guard:
    """Before anything else sees a request: its key, its size, and its time."""

    def __init__(self, app: Any, limit: int, key: str | None, seconds: float):
        self.app, self.limit, self.key, self.seconds = app, limit, key, seconds

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        refused = self.refusal(scope["path"], headers)
        if refused is not None:
            return await Response(
                error_body(refused), refused.status, media_type="application/json"
            )(
                scope,
                receive,
                send,
            )
        taken, begun = 0, False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.limit:
                raise TooMuch
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            if taken > self.limit and not begun:  # FastAPI has made something else of it
                raise TooMuch
            begun = True
            await send(message)

        try:
            # A little longer than the engine allows, for a reader that does not read.
            async with asyncio.timeout(self.seconds + 5):
                await self.app(scope, counted, noted)
        except (TooMuch, TimeoutError) as error:
            if begun:
                return  # the connection is closed
            late = Refused(504, "the time for this request is over")
            refused = self.too_long() if isinstance(error, TooMuch) else late
            await Response(error_body(refused), refused.status, media_type="application/json")(
                scope,
                receive,
                send,
            )

    def refusal(self, path: str, headers: dict[bytes, bytes]) -> Refused | None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            return self.too_long()
        if self.key is None or path == "/health":
            return None
        wanted = f"Bearer {self.key}".encode()
        if hmac.compare_digest(headers.get(b"authorization", b""), wanted):
            return None
        return Refused(401, "a key is needed: Authorization: Bearer KEY")

    def too_long(self) -> Refused:
        return Refused(413, f"the request is longer than {self.limit:,} bytes")
