"""No secret of a URL is printed, stored or left in a traceback, whatever a running web server or S3 server answers."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import logging
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_files
import pytest
from object_store import environment_of, led_to_a_server, s3_server
from rank_processes.ranks import free_port

from ort_zero.checkpoint import aggregate, diff, list_checkpoints, verify
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.cli import main as cli
from ort_zero.errors import CheckpointError

SECRET = "hunter2secret"
TOKEN = "sig%2Fnature99"
FORMS = (SECRET, TOKEN, "sig/nature99", base64.b64encode(f"user:{SECRET}".encode()).decode())


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; answers paths with ``forbidden``, ``broken`` or ``cut`` in them as their names say."""

    def do_GET(self) -> None:
        for word, status in (("forbidden", 403), ("broken", 500), ("gone", 404)):
            if word in self.path:
                self.send_error(status, f"{word}: {self.path}")
                return
        if "cut" in self.path:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            super().do_GET()
            return
        first, last, data = 0, path.stat().st_size - 1, path.read_bytes()
        wanted = self.headers.get("Range") if "whole" not in self.path else None
        if wanted:
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or last), last)
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[first : last + 1])

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """URL of a web server, with a password and a token; its folder holds the checkpoint ``run/global_step7``."""
    checkpoint_files.write(tmp_path / "www" / "run" / "global_step7")
    (tmp_path / "www" / "run" / "latest").write_text("global_step7")
    handler = functools.partial(Server, directory=str(tmp_path / "www"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://user:{SECRET}@127.0.0.1:{server.server_port}/PATH?token={TOKEN}"
    server.shutdown()
    server.server_close()


def everything_about(error: BaseException) -> str:
    """Return what Python shows of an error, its arguments and those of its causes."""
    text = "".join(traceback.format_exception(error)) + repr(error.args)
    seen: BaseException | None = error
    while seen is not None:
        text += repr(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return text


def clean(text: str) -> bool:
    return not any(form in text for form in FORMS)


def calls(url: str, out: Path) -> list[Callable[[], Any]]:
    """Return a call of each function that reads a checkpoint."""
    return [
        lambda: verify(url, progress=False),
        lambda: aggregate(url, out / "a", progress=False),
        lambda: convert(url, out / "c", progress=False),
        lambda: diff(url, url, progress=False),
        lambda: list_checkpoints(url),
        lambda: open_folder(url).read("manifest.json"),
        lambda: open_folder(url).names(),
    ]


def test_a_web_server(address, tmp_path, capfd, caplog):
    caplog.set_level(logging.DEBUG, "ort_zero")
    failures = 0
    for word in ("forbidden", "broken", "cut", "gone"):
        for number, call in enumerate(calls(address.replace("PATH", word), tmp_path / word)):
            try:
                result = repr(call())
            except Exception as error:
                assert isinstance(error, CheckpointError), (word, number, repr(error))
                result = everything_about(error)
                failures += 1
            assert clean(result), (word, number, result)
    assert failures > 16
    good = address.replace("PATH", "run/global_step7")
    assert verify(good, progress=False).ok
    shutil.copytree(tmp_path / "www" / "run", tmp_path / "www" / "whole")
    with pytest.raises(CheckpointError, match="so it ignores ranged requests"):
        aggregate(address.replace("PATH", "whole/global_step7"), tmp_path / "whole", progress=False)
    for command in (["verify", good], ["aggregate", good, str(tmp_path / "model")], ["diff", good, good], ["ls", good]):
        assert cli.main([*command, "--debug"]) == 0, command
    for word in ("forbidden", "broken", "cut", "gone"):
        for command in ("verify", "ls"):
            for more in ([], ["--json"], ["--debug"]):
                assert cli.main([command, address.replace("PATH", word), *more]) != 0 or command == "ls"
    said = "".join(capfd.readouterr()) + caplog.text
    assert clean(said), [line for line in said.splitlines() if not clean(line)]
    written = (path for path in tmp_path.rglob("*") if path.is_file() and "www" not in path.parts)
    assert all(clean(path.read_bytes().decode(errors="replace")) for path in written)


def test_a_web_server_that_is_gone(tmp_path, capfd):
    url = f"http://user:{SECRET}@127.0.0.1:{free_port()}/run?token={TOKEN}"
    for call in calls(url, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert clean(everything_about(caught.value)) and "***@127.0.0.1" in str(caught.value)
    assert cli.main(["verify", url, "--debug"]) == 2
    assert clean("".join(capfd.readouterr()))


def test_an_s3_server(tmp_path_factory, tmp_path, capfd):
    folder = tmp_path_factory.mktemp("server")
    with contextlib.ExitStack() as afterwards:
        with s3_server(folder) as port:
            environment = environment_of(f"http://127.0.0.1:{port}", key="key")
            afterwards.enter_context(
                led_to_a_server({**environment, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_MAX_ATTEMPTS": "1"})
            )
            import boto3

            boto3.client("s3").create_bucket(Bucket="models")
            checkpoint_files.write("s3://models/run/global_step7")
            aggregate("s3://models/run/global_step7", "s3://models/out", progress=False)
            folder = open_folder("s3://models")
            names = [f"{place}/{name}" for place in ("run/global_step7", "out") for name in folder.child(place).names()]
            assert len(names) > 10 and all(clean(folder.read(name).decode(errors="replace")) for name in names)
            said = ""
            for url in (f"s3://key:{SECRET}@models/run", "s3://nobodys/run", f"s3://models/run?token={TOKEN}"):
                for call in calls(url, tmp_path):
                    try:
                        said += repr(call())
                    except CheckpointError as error:
                        said += everything_about(error)
                for command in ("verify", "ls"):
                    cli.main([command, url, "--debug"])
                if "@" in url:
                    with pytest.raises(CheckpointError) as caught:
                        aggregate("s3://models/run/global_step7", f"{url}/out", progress=False)
                    said += everything_about(caught.value)
            assert said and clean(said + "".join(capfd.readouterr()))
        for call in calls("s3://models/run/global_step7", tmp_path)[:2]:
            with pytest.raises(CheckpointError) as caught:
                call()
            assert clean(everything_about(caught.value))
