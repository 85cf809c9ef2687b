"""Measures checkpoints in an object store beside a plain copy of the same bytes through the same server.

The server is moto's, in a process of its own, or any that ``--endpoint`` names (with boto's variables for credentials).
The plain copy is boto3's ``upload_file`` and ``download_file``, which send and ask for parts by ten threads, file after
file. Each way is measured in turn, and the bytes that were read are held against those that were needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aggregate import alone, write_ours

BYTES_GOAL = 1.05
"""Most bytes that may be read for each that is needed."""
LIBRARY = "boto3"
BUCKET = "ort-zero-benchmark"


@contextlib.contextmanager
def server(endpoint: str | None, folder: Path) -> Iterator[str]:
    """Give the address of a server that speaks S3."""
    if endpoint:
        yield endpoint
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    with (folder / "server.log").open("w") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "server.log").read_text())
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def client() -> Any:
    """Return boto's client."""
    import boto3

    return boto3.client("s3")


def copy_up(local: Path) -> tuple[int, int]:
    """Copy the files of a folder into the bucket; return their bytes twice."""
    for path in local.iterdir():
        client().upload_file(str(path), BUCKET, f"copy/{path.name}")
    size = sum(path.stat().st_size for path in local.iterdir())
    return size, size


def copy_down(local: Path, out: Path) -> tuple[int, int]:
    """Copy the files that lie in the bucket into a folder."""
    for path in local.iterdir():
        client().download_file(BUCKET, f"run/t/{path.name}", str(out / path.name))
    size = sum(path.stat().st_size for path in local.iterdir())
    return size, size


def upload(local: Path) -> tuple[int, int]:
    """Write the same files as a save does, under partial names that become the final ones."""
    from ort_zero.checkpoint.files.storage import open_folder

    folder = open_folder(f"s3://{BUCKET}/written")
    for path in local.iterdir():
        with folder.writing(path.name, "t", size=path.stat().st_size) as stream, path.open("rb") as file:
            while block := file.read(1 << 20):
                stream.write(block)
        folder.publish(path.name, "t")
    size = sum(path.stat().st_size for path in local.iterdir())
    return size, size


def verified(local: Path) -> tuple[int, int]:
    """Verify; return the bytes that were read and those of the files."""
    from ort_zero.checkpoint import verify

    report = verify(f"s3://{BUCKET}/run", "t", progress=False)
    wrong = [text for text in report.problems if "lists no extra file" not in text]  # those of this benchmark have none
    if wrong:
        raise RuntimeError(wrong)
    return report.bytes, sum(path.stat().st_size for path in local.iterdir())


def aggregated(local: Path, out: str) -> tuple[int, int]:
    """Aggregate weights and optimizer; return the bytes that were read and those of the tensors."""
    from ort_zero.checkpoint import aggregate

    report = aggregate(f"s3://{BUCKET}/run", out, tag="t", what="weights+optimizer", progress=False, overwrite=True)
    return report.bytes_read, sum(path.stat().st_size for path in local.glob("*.safetensors"))


def loaded(local: Path) -> tuple[int, int]:
    """Read what the first rank loads: its own pieces of everything."""
    import torch

    from ort_zero.checkpoint.files.dtypes import itemsize, torch_dtype
    from ort_zero.checkpoint.files.storage import open_folder
    from ort_zero.checkpoint.finding import open_checkpoint
    from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest

    source = open_checkpoint(f"s3://{BUCKET}/run/t")
    requests = []
    for tensor in source.tensors:
        for piece in (piece for piece in tensor.pieces if piece.file.startswith("rank_00000")):
            room = torch.empty(piece.length // itemsize(tensor.dtype), dtype=torch_dtype(tensor.dtype))
            requests.append(ReadRequest(tensor=tensor, start=piece.start, length=room.numel(), target=room))
    folder = open_folder(source.root)
    CheckedReader(folder, source.files).read(requests)
    return folder.bytes_read, sum(request.length * itemsize(request.tensor.dtype) for request in requests)


def main() -> int:
    """Print a table; return 1 if more is read than the goal says."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, help="size of the weights; moments take twice that")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="folder for what is made (default: the system's)")
    parser.add_argument("--endpoint", help="address of another server; the bucket there is made, and stays")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch, server(args.endpoint, Path(scratch)) as url:
        os.environ["AWS_ENDPOINT_URL"] = url
        with contextlib.suppress(Exception):  # it may be there
            client().create_bucket(Bucket=BUCKET)
        local, out = Path(scratch, "source"), Path(scratch, "out")
        alone(write_ours, str(local), args.ranks, args.megabytes * 1_000_000)
        local = next(path for path in (local, *local.iterdir()) if (path / "manifest.json").exists())
        for path in local.iterdir():
            client().upload_file(str(path), BUCKET, f"run/t/{path.name}")
        (out / "plain").mkdir(parents=True)
        ways: dict[str, Callable[[], tuple[int, int]]] = {
            f"upload, {LIBRARY}": lambda: copy_up(local),
            "upload as a save does": lambda: upload(local),
            f"download, {LIBRARY}": lambda: copy_down(local, out / "plain"),
            "verify": lambda: verified(local),
            "load, one rank's part": lambda: loaded(local),
            "aggregate into a folder": lambda: aggregated(local, str(out / "model")),
            "aggregate into the store": lambda: aggregated(local, f"s3://{BUCKET}/model"),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        found: dict[str, tuple[int, int]] = {}
        for _ in range(args.rounds):
            for way, function in ways.items():
                begun = time.perf_counter()
                found[way] = function()
                seconds[way].append(time.perf_counter() - begun)
    rows = []
    for way, (read, needed) in found.items():
        median = statistics.median(seconds[way])
        rows.append({"way": way, "seconds": median, "MB/s": needed / 1e6 / median, "read": read / needed})
    if args.json:
        print(json.dumps(rows))
    else:
        print("| | seconds | MB/s | bytes read of those needed |\n|---|---|---|---|")
        for row in rows:
            print(f"| {row['way']} | {row['seconds']:.1f} | {row['MB/s']:.0f} | {row['read']:.3f} |")
    return int(any(row["read"] > BYTES_GOAL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
