"""An object store that throttles, breaks, cuts connections and lets credentials expire, in the middle of everything.

What is over in a moment is tried again by the library below fsspec. What stays is one error on all ranks that names the
URL and the way out; then nothing half-written is taken for whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoint_engines import outcome
from checkpoint_files import write
from deepspeed_setup import ds_config, start
from object_store import Fault, Proxy, environment_of, led_to_a_server, proxy_before, s3_server, set_faults, traffic_of
from rank_processes.ranks import run_on_ranks
from s3fs import S3FileSystem

from ort_zero.checkpoint import aggregate, convert, diff, verify
from ort_zero.checkpoint.files import storage
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.records import MASTER
from ort_zero.errors import CheckpointError

PASSING = ("throttled", "broken", "cut")
RUN = "s3://models/run/whole"
TAG = "global_step7"
"""What its manifest says."""
SECRETS = ("a_secret_of_nobody", "Credential=")
QUICK = {"AWS_MAX_ATTEMPTS": "4", "AWS_RETRY_MODE": "standard"}
"""One try more than there are passing faults: a request may meet all of them."""


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Proxy]:
    """A proxy before a server with the bucket ``models``, in which a checkpoint of 18 MiB lies."""
    folder = tmp_path_factory.mktemp("store")
    with (
        s3_server(folder) as port,
        proxy_before(port) as proxy,
        led_to_a_server({**environment_of(proxy.url), **QUICK}),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(S3FileSystem, "retries", 3)
        client().create_bucket(Bucket="models")
        tensors = {(kind, f"{name}.weight"): torch.randn(768, 1024)
                   for name in ("first", "second") for kind in (MASTER, "exp_avg", "exp_avg_sq")}  # fmt: skip
        write(folder / "whole", tensors)
        for path in (folder / "whole").iterdir():
            client().upload_file(str(path), "models", f"run/whole/{path.name}")
        yield proxy


@pytest.fixture(autouse=True)
def no_faults_left(store) -> Iterator[None]:
    yield
    store.set()
    for upload in client().list_multipart_uploads(Bucket="models").get("Uploads", []):
        client().abort_multipart_upload(Bucket="models", Key=upload["Key"], UploadId=upload["UploadId"])


def client() -> Any:
    import boto3

    return boto3.client("s3")


def uploads() -> list[str]:
    """Return the objects whose upload has begun, and has not ended."""
    return [upload["Key"] for upload in client().list_multipart_uploads(Bucket="models").get("Uploads", [])]


def size_of(url: str) -> int:
    folder = open_folder(url)
    return sum(folder.size(name) or 0 for name in folder.names())


def verified(destination: str) -> None:
    report = verify(RUN, progress=False)
    if not report.ok:
        raise CheckpointError("; ".join(report.problems))


def aggregated(destination: str) -> None:
    aggregate(RUN, destination, what="weights+optimizer", progress=False)


def converted(destination: str) -> None:
    convert(RUN, destination, world_size=1, progress=False)


def converted_for_deepspeed(destination: str) -> None:
    convert(RUN, destination, to="deepspeed", stage=2, world_size=1, progress=False)


ACTIONS = {"verify": verified, "aggregate": aggregated, "convert": converted, "deepspeed": converted_for_deepspeed}


@pytest.mark.parametrize("name", ["verify", "aggregate", "convert"])
def test_what_is_over_in_a_moment_is_tried_again(store, monkeypatch, name):
    monkeypatch.setattr(storage, "RANGE_BYTES", 1 << 20)
    faults = [Fault(kind, where, after=after, times=1)
              for where in ("GET /models/run", f"PUT .*{name}") for after, kind in enumerate(PASSING)]  # fmt: skip
    store.set(*faults, delay=0.02)
    ACTIONS[name](f"s3://models/passing_{name}")
    traffic = store.traffic
    assert traffic.faults >= (len(PASSING) if name == "verify" else 2 * len(PASSING))
    assert traffic.most_at_once > 1
    store.set()
    ACTIONS[name](f"s3://models/again_{name}")
    assert 0.99 * size_of(RUN) < store.traffic.read <= 1.05 * size_of(RUN)
    assert uploads() == []
    if name == "aggregate":
        content = [
            open_folder(f"s3://models/{one}_aggregate").read("model.safetensors") for one in ("passing", "again")
        ]
        assert content[0] == content[1]
    elif name != "verify":
        place = f"s3://models/passing_{name}"
        assert verify(place, progress=False).ok
        found = diff(RUN, place, progress=False)
        assert found.same and found.compared == 6


LASTING = [("verify", "throttled"), ("aggregate", "broken"), ("aggregate", "expired"), ("convert", "cut"),
           ("convert", "expired"), ("deepspeed", "throttled")]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), LASTING)
def test_what_stays_is_one_error_and_the_next_run_succeeds(store, name, kind):
    """Reading fails, then writing in the middle; then it is done again."""
    destination = f"s3://models/lasting_{name}_{kind}"
    faults = [Fault(kind, "GET /models/run/whole/rank", after=2)]
    if name != "verify":
        # with credentials that have expired nothing can be removed either
        part = "" if name == "deepspeed" else ".*partNumber"
        faults.append(Fault(kind, f"lasting_{name}" if kind == "expired" else f"PUT .*lasting_{name}{part}",
                            after=4 if kind == "expired" else 0))  # fmt: skip
    for fault in faults:
        store.set(fault)
        with pytest.raises(CheckpointError) as raised:
            ACTIONS[name](destination)
        text = str(raised.value)
        assert ("s3://models/run/whole/rank" if fault is faults[0] else destination) in text, text
        assert "do it again when the store answers, with credentials that it accepts" in text, text
        assert not any(secret in text for secret in SECRETS), text
        store.set()
        names = open_folder(destination).names() + open_folder(f"{destination}/{TAG}").names()
        assert all(one.endswith(".partial") for one in names if one != TAG), names
        assert kind == "expired" or uploads() == []
    if name == "verify":
        return
    where = f"{TAG}/" if name != "aggregate" else ""
    ACTIONS[name](destination)
    assert kind == "expired" or uploads() == []
    assert not [one for one in open_folder(f"{destination}/{where}").names() if one.endswith(".partial")]


def test_a_store_that_refuses_to_remove_lets_no_old_model_be_loaded(store):
    """A single file of an earlier aggregation would be loaded in place of new ones and their index."""
    aggregated("s3://models/replaced")
    store.set(Fault("broken", "DELETE .*replaced/model.safetensors"))
    with pytest.raises(CheckpointError, match="cannot remove s3://models/replaced/model.safetensors"):
        aggregate(RUN, "s3://models/replaced", max_shard_size="4MB", overwrite=True, progress=False)


def engine() -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1280), torch.nn.Linear(1280, 1))
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(2, ort=False))
    return made


def trained(made: Any) -> float:
    loss = made(torch.ones(2, 1024)).square().sum()
    made.backward(loss)
    made.step()
    return loss.item()


def save_and_load(url: str) -> dict[str, Any]:
    """Save and load on two ranks with faults that pass, with some that stay, with credentials that have expired."""
    rank = start()
    found: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[], Any], *faults: Fault) -> None:
        torch.distributed.barrier()
        if rank == 0:
            set_faults(url, *faults, delay=0.02)
        torch.distributed.barrier()
        found[name] = outcome(action)
        torch.distributed.barrier()
        found[name]["traffic"] = traffic_of(url)
        torch.distributed.barrier()

    made = engine()
    trained(made)

    def save(tag: str) -> None:
        made.save_checkpoint("s3://models/trained", tag=tag)

    def load() -> None:
        made.load_checkpoint("s3://models/trained", tag="passing")

    def value() -> float:
        return sum(parameter.detach().double().sum().item() for parameter in made.module.parameters())

    passing = [Fault(kind, "PUT .*trained", after=i, times=1) for i, kind in enumerate(PASSING)]
    attempt("passing save", lambda: save("passing"), *passing)
    saved = value()
    for kind in PASSING:
        attempt(f"save {kind}", lambda kind=kind: save(f"lasting_{kind}"), Fault(kind, "PUT .*rank_00001_optimizer"))
    trained(made)
    here = value()
    for kind in PASSING:
        attempt(f"load {kind}", load, Fault(kind, "GET .*passing/rank_00001", after=1))
    found["untouched"] = (saved, here, value())
    passing = [Fault(kind, "GET .*trained", after=i, times=1) for i, kind in enumerate(PASSING)]
    attempt("passing load", load, *passing)
    found["loaded"] = value() == saved
    attempt("counted load", load)
    attempt("expired", lambda: save("expired"), Fault("expired", "trained/expired", after=9))
    return found


def test_ranks_save_and_load(store):
    env = {**environment_of(store.url), **QUICK}
    results = run_on_ranks(save_and_load, 2, store.url, timeout=200, env=env)
    store.set()
    folder = open_folder("s3://models/trained")
    for rank, found in enumerate(results):
        print({name: round(one["seconds"], 1) for name, one in found.items() if isinstance(one, dict)})
        for name in ("passing save", "passing load"):
            assert found[name]["type"] is None, (rank, name, found[name])
        assert found["passing save"]["traffic"].faults == found["passing load"]["traffic"].faults == len(PASSING)
        saved, here, after = found["untouched"]
        assert saved != here == after and found["loaded"], found["untouched"]
        for kind in PASSING:
            one = found[f"save {kind}"]
            assert one["type"] == ("CheckpointError" if rank else "RankError"), one
            assert f"s3://models/trained/lasting_{kind}/rank_00001_optimizer.safetensors" in one["text"], one
            one = found[f"load {kind}"]
            assert one["type"] in ("CheckpointError", "RankError"), one
            assert "s3://models/trained/passing/rank_00001" in one["text"], one
        assert found["expired"]["type"] in ("CheckpointError", "RankError")
        assert "with credentials that it accepts" in found["expired"]["text"]
        assert not any(secret in str(found) for secret in SECRETS)
        counted = found["counted load"]["traffic"]
        needed = size_of("s3://models/trained/passing")
        assert counted.read <= 1.05 * needed
    assert verify("s3://models/trained", "passing", progress=False).ok
    assert uploads() == []
    for kind in PASSING:
        assert folder.child(f"lasting_{kind}").names() == []
    assert folder.read("latest") == b"passing"


@pytest.mark.slow
def test_a_store_that_never_answers_ends_in_an_error(store, monkeypatch):
    store.set(Fault("silent", "GET /models/run/whole/rank_00001"))
    with pytest.raises(CheckpointError, match="do it again when the store answers"):
        aggregated("s3://models/silent")
    assert open_folder("s3://models/silent").names() == []
