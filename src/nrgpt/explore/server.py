"""A small web server for the explorer: the page, and answers of Python for models that are too
large for a page. It listens on this machine only, and answers nobody who does not know its key."""

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

HOST = "127.0.0.1"
LARGEST = 1 << 20
"""Bytes of the longest question."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Server(ThreadingHTTPServer):
    """``page`` is served at ``address``; ``answers`` are asked by POST /NAME with JSON, one at a
    time, since they share a model."""

    daemon_threads = True

    def __init__(self, page: str, answers: Mapping[str, Answer], key: str, port: int = 0):
        super().__init__((HOST, port), Handler)
        self.page, self.answers, self.key = page.encode(), answers, key
        self.one_at_a_time = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/?key={self.key}"


def new_key() -> str:
    return secrets.token_urlsafe(24)


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # of a connection that says nothing
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        key = parse_qs(asked.query).get("key", [""])[0]
        if asked.path != "/":
            self.reply(404, b"there is nothing here", "text/plain")
        elif not self.is_local() or not self.is_key(key):
            self.reply(403, b"open the address that nrgpt explore has printed", "text/plain")
        else:
            self.reply(200, self.server.page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        body = self.question()
        if not self.is_local() or not self.is_key(self.headers.get("X-NRGPT-Key", "")):
            return self.say(403, {"error": "wrong key: open the address of nrgpt explore again"})
        answer = self.server.answers.get(self.path.strip("/"))
        if answer is None or body is None:
            return self.say(404 if answer is None else 400, {"error": "no such question"})
        try:
            with self.server.one_at_a_time:
                found = answer(body)
        except (ValueError, KeyError, TypeError) as error:
            return self.say(400, {"error": str(error) or type(error).__name__})
        except Exception as error:  # such as too little memory: the page says so, and goes on
            return self.say(500, {"error": str(error) or type(error).__name__})
        self.say(200, found)

    def question(self) -> dict[str, Any] | None:
        """The JSON that was sent; None if it is none, or too long."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9 or int(length) > LARGEST:
            self.close_connection = True
            return None
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return None
        return body if isinstance(body, dict) else None

    def is_local(self) -> bool:
        """A page from elsewhere may send a browser here under a name of its own."""
        port = self.server.server_port
        return self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}")

    def is_key(self, key: str) -> bool:
        return secrets.compare_digest(key.encode(), self.server.key.encode())

    def say(self, status: int, found: dict[str, Any]) -> None:
        self.reply(status, json.dumps(found).encode(), "application/json")

    def reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *about: Any) -> None:
        """Nothing: keys do not belong into a terminal's history."""
