"""An S3 server in a process of its own (moto's), and a proxy before it that produces the faults of real stores.

Ranks reach the proxy over HTTP only, so a rank changes the faults by a request to it, see :func:`set_faults`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rank_processes.ranks import free_port

_CONTROL = "/__proxy__"
_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>{}</Message></Error>'
_ANSWERS = {
    "throttled": (503, _ERROR.format("SlowDown", "Please reduce your request rate.")),
    "broken": (500, _ERROR.format("InternalError", "We encountered an internal error. Please try again.")),
    "expired": (400, _ERROR.format("ExpiredToken", "The provided token has expired.")),
}


@dataclass
class Fault:
    """What happens to some requests instead of an answer.

    Attributes:
        kind: "throttled", "broken" or "expired", which answer with 503, 500 and 400; "cut", which closes the connection
            in the middle of the request's body, or of the answer's where the request has none; "silent", which never
            answers.
        where: regular expression, found in ``METHOD /bucket/key?query`` of the request.
        after: matching requests that are let through first.
        times: requests that it happens to, None for all that follow.
    """

    kind: str
    where: str = ""
    after: int = 0
    times: int | None = None


@dataclass
class Traffic:
    """What has passed the proxy since the last :func:`set_faults`."""

    requests: int = 0
    faults: int = 0
    read: int = 0
    """Bytes of the bodies of GET requests with a range."""
    most_at_once: int = 0
    """Most GET requests with a range that were under way at the same time."""
    under_way: int = 0
    lines: list[str] = field(default_factory=list)


class Proxy(ThreadingHTTPServer):
    """Forwards requests to a server on this machine, but for those that meet a fault."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", free_port()), _Handler)
        self.to = port
        self.lock = threading.Lock()
        self.faults: list[Fault] = []
        self.traffic = Traffic()
        self.delay = 0.0
        """Seconds before each answer to a GET with a range."""
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        """Address for ``AWS_ENDPOINT_URL``."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def set(self, *faults: Fault, delay: float = 0.0) -> None:
        """Let these faults happen from now on, and begin to count anew."""
        with self.lock:
            self.faults, self.traffic, self.delay = list(faults), Traffic(), delay

    def fault_of(self, line: str) -> str | None:
        """Return the kind of the fault that a request meets."""
        with self.lock:
            self.traffic.requests += 1
            self.traffic.lines.append(line)
            for fault in self.faults:
                if not re.search(fault.where, line):
                    continue
                if fault.after:
                    fault.after -= 1
                elif fault.times != 0:
                    fault.times = None if fault.times is None else fault.times - 1
                    self.traffic.faults += 1
                    return fault.kind
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that is gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy
    timeout = 120

    def log_message(self, *args: Any) -> None:
        """Say nothing of requests."""

    def handle_any(self) -> None:
        """Answer a request."""
        length = int(self.headers.get("Content-Length") or 0)
        if self.path.startswith(_CONTROL):
            asked = json.loads(self.rfile.read(length) or "null")
            before = asdict(self.server.traffic)
            if asked is not None:
                self.server.set(*(Fault(**fault) for fault in asked["faults"]), delay=asked["delay"])
            self._answer(200, {}, json.dumps(before).encode())
            return
        kind = self.server.fault_of(f"{self.command} {self.path}")
        if kind == "silent":
            self.server.ended.wait()
        if kind == "cut" and length:
            self.rfile.read(length // 2)
        if kind == "silent" or (kind == "cut" and length):
            self._cut()
            return
        body = self.rfile.read(length)
        if kind in _ANSWERS:
            status, text = _ANSWERS[kind]
            self._answer(status, {"Content-Type": "application/xml"}, text.encode())
            return
        self._forward(body, kind)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def _forward(self, body: bytes, kind: str | None) -> None:
        traffic, ranged = self.server.traffic, self.command == "GET" and "Range" in self.headers
        if ranged:
            with self.server.lock:
                traffic.under_way += 1
                traffic.most_at_once = max(traffic.most_at_once, traffic.under_way)
        try:
            if ranged:
                time.sleep(self.server.delay)
            upstream = http.client.HTTPConnection("127.0.0.1", self.server.to, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            content = answer.read()
            upstream.close()
            if ranged:
                with self.server.lock:
                    traffic.read += len(content)
            kept = {n: v for n, v in answer.getheaders() if n.lower() not in ("transfer-encoding", "connection")}
            self._answer(answer.status, kept, content, cut=kind == "cut")
        finally:
            if ranged:
                with self.server.lock:
                    traffic.under_way -= 1

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        sized = {name.lower() for name in headers}
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in sized:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._cut()

    def _cut(self) -> None:
        """End the connection as a host that goes down does: with a reset."""
        self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


def set_faults(url: str, *faults: Fault, delay: float = 0.0) -> Traffic:
    """Let these faults happen from now on; return what has passed since the last call. From any process."""
    return _control(url, json.dumps({"faults": [asdict(fault) for fault in faults], "delay": delay}).encode())


def traffic_of(url: str) -> Traffic:
    """Return what has passed since the last :func:`set_faults`. From any process."""
    return _control(url, None)


def _control(url: str, data: bytes | None) -> Traffic:
    request = urllib.request.Request(url + _CONTROL, data=data, method="GET" if data is None else "POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return Traffic(**json.load(answer))


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """Start moto's server in a process of its own; give its port. What it prints goes into `folder`."""
    port = free_port()
    with (folder / "s3_server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            text = (folder / "s3_server.log").read_text()
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def proxy_before(port: int) -> Iterator[Proxy]:
    """Run a proxy in threads of this process."""
    proxy = Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        proxy.shutdown()
        proxy.server_close()


def environment_of(url: str, key: str = "test") -> dict[str, str]:
    """Return the variables that lead boto to a server."""
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": "a_secret_of_nobody",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def led_to_a_server(environment: dict[str, str]) -> Iterator[None]:
    """Lead boto and s3fs of this process to a server, and away from it at the end.

    s3fs keeps its connections for good, by the options in the URL and not by the environment: without this a test
    would talk to the server that an earlier test of the same process has ended.
    """
    from s3fs import S3FileSystem

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        try:
            yield
        finally:
            S3FileSystem.clear_instance_cache()
