"""Training, checkpoints and aggregation on two hosts, which are namespaces of this machine, under every launcher."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from namespaces import Hosts, two_hosts, why_not
from rank_processes.ranks import free_port
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"two hosts cannot be made: {why_not()}"),
]
SMALL = ["--layers", "1", "--hidden", "32", "--seq", "16", "--expect-ort"]
TORCHRUN = ["python", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d"]
TIMEOUT = 400


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder that both hosts see."""
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def hosts(shared) -> Iterator[Hosts]:
    with two_hosts(shared) as found:
        yield found


@pytest.fixture(scope="module")
def trained(hosts, shared) -> tuple[Path, list[str]]:
    """A checkpoint of three steps on both hosts, and what the hosts printed; parity with PyTorch is looked at."""
    out = shared / "out"
    texts = on_both(hosts, torchrun(["examples/train_lm.py", "--deepspeed_config", "configs/zero3.json", *SMALL,
                                     "--steps", "3", "--compare-torch", "3", "--out", out]))  # fmt: skip
    return out, texts


def torchrun(words: list[str | Path]) -> list[str]:
    """Return a command that both hosts run."""
    return [*TORCHRUN, "--rdzv_endpoint", f"node0:{free_port()}", "--rdzv_id", "t", *map(str, words)]


def on_both(hosts: Hosts, *commands: list[str], fails: bool = False, **env: str) -> list[str]:
    """Run a command on each host, the same one if only one is given; return what they printed."""
    started = [host.start(*command, **env) for host, command in zip(hosts.hosts, commands * (2 // len(commands)))]
    with ThreadPoolExecutor() as pool:  # both are read: the other one would wait when its pipe is full
        texts = list(pool.map(lambda process: process.communicate(timeout=TIMEOUT)[0], started))
    assert fails or not any(process.returncode for process in started), "\n----\n".join(text[-6000:] for text in texts)
    assert not fails or all(process.returncode for process in started), "\n----\n".join(texts)
    return texts


def proof(text: str, steps: int) -> list[float]:
    """Return the losses that rank 0 printed; ONNX Runtime ran every step."""
    assert "backend: onnxruntime, ZeRO stage 3" in text and "fallbacks: 0" in text, text
    units = int(re.search(r"torch.compile: (\d+) unit", text)[1])
    assert f"{steps * units} forward and {steps * units} backward runs" in text, text
    return [float(loss) for loss in re.findall(r"^step\s+\d+/\d+\s+loss (\S+)", text, re.M)]


def whole(out: Path) -> None:
    """Check a checkpoint to which two ranks have written."""
    report = verify(out, progress=False)
    assert report.ok and report.format == "ort_zero", report.problems
    assert {path.name[:10] for path in out.glob("*/rank_*")} == {"rank_00000", "rank_00001"}


def test_torchrun_trains_as_pytorch_does_and_saves_one_checkpoint(trained):
    out, texts = trained
    assert len(proof(texts[0], 3)) == 3 and "loss" not in texts[1], texts
    apart = re.search(r"PyTorch on the same 3 steps: losses within (\S+) of these", texts[0])
    assert apart and float(apart[1]) < 1e-4, texts[0]
    whole(out)


def test_both_hosts_aggregate_into_the_same_files(hosts, trained, shared):
    out, _ = trained
    on_both(hosts, torchrun(["-m", "ort_zero", "aggregate", out, shared / "model"]))
    aggregate(out, shared / "alone", progress=False)
    found, wanted = (load_file(shared / name / "model.safetensors") for name in ("model", "alone"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_accelerate_trains_on_two_machines(hosts):
    port = str(free_port())
    command = ["python", "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate_zero3.yaml",
               "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "node0", "--main_process_port", port,
               "--deepspeed_multinode_launcher", "standard"]  # fmt: skip
    script = ["examples/train_accelerate.py", *SMALL, "--steps", "3"]
    texts = on_both(hosts, *([*command, "--machine_rank", str(rank), *script] for rank in range(2)))
    assert len(proof(texts[0], 3)) == 3


def test_hosts_with_disks_of_their_own_are_told_to_share_a_folder(hosts, shared):
    texts = on_both(
        hosts,
        torchrun(["examples/train_lm.py", "--deepspeed_config", "configs/zero3.json", *SMALL, "--steps", "1",
                  "--out", shared / "own" / "out"]),
        fails=True,
    )  # fmt: skip
    assert "rank_00001_master.safetensors of rank 1 is not there" in texts[0], texts[0]
    assert "a local disk of each machine" in texts[0] and "The checkpoint was not made" in texts[0]
    assert "saving" in texts[1] and "failed on another rank: rank 0" in texts[1], texts[1]


def test_a_link_that_is_cut_ends_both_hosts_and_names_the_other(hosts, shared):
    """The cable is pulled in the middle of training; nobody is told, so that the process group's limit decides."""
    command = torchrun(
        ["examples/train_lm.py", "--deepspeed_config", "configs/zero3.json", *SMALL, "--steps", "100000"]
    )
    for host in hosts.hosts:  # else torchrun waits for its store until the kernel gives up, a quarter of an hour later
        host.run("sh", "-c", "echo 8 > /proc/sys/net/ipv4/tcp_retries2")
    logs = [shared / f"cut_{number}.log" for number in range(2)]
    started = [host.start(*command, into=log, DEEPSPEED_TIMEOUT="1") for host, log in zip(hosts.hosts, logs)]
    deadline = time.monotonic() + TIMEOUT
    while not re.search(r"^step .*loss", logs[0].read_text(), re.M):
        assert time.monotonic() < deadline, logs[0].read_text()[-6000:]
        time.sleep(0.2)
    hosts.cut(1)
    try:
        begun = time.monotonic()
        gone: dict[str, float] = {}
        while len(gone) < 4:
            assert time.monotonic() < begun + 240, (gone, [log.read_text()[-6000:] for log in logs])
            for rank, (process, log) in enumerate(zip(started, logs)):
                if "a collective failed" in log.read_text():
                    gone.setdefault(f"rank {rank}", time.monotonic() - begun)
                if process.poll() is not None:
                    gone.setdefault(f"launcher {rank}", time.monotonic() - begun)
            time.sleep(0.2)
    finally:
        hosts.mend(1)
    print({name: round(seconds) for name, seconds in gone.items()})
    texts = [log.read_text() for log in logs]
    assert all(process.returncode for process in started), texts
    # the limit, and the seconds in which other ranks and the store are asked
    assert max(gone["rank 0"], gone["rank 1"]) < 60 + 30, (gone, texts)
    for rank, text in enumerate(texts):
        other = 1 - rank
        line = (
            rf"\[ort_zero rank {rank} on node{rank}\] a collective failed.* rank {other} \(node{other}, process \d+\)"
        )
        assert re.search(line, text), text[-6000:]


# -- DeepSpeed's own launchers -----------------------------------------------------------------------------------------


def missing(*tools: str) -> str | None:
    """Return why the hosts cannot reach each other by ssh, None if they can."""
    absent = [tool for tool in ("ssh", "sshd", "ssh-keygen", *tools)
              if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]  # fmt: skip
    if absent:
        return f"{', '.join(absent)} not found: apt-get install openssh-server openssh-client pdsh"
    return None if os.geteuid() == 0 else "only root starts sshd for root, as whom these hosts run"


@pytest.fixture(scope="module")
def ssh(hosts, shared) -> Path:
    """Let the hosts reach each other by ssh without a password, with keys made for it; return the host file."""
    if missing() is not None:
        pytest.skip(missing())
    keys = shared / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("id_ed25519", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")
    (keys / "config").write_text("Host node*\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
                                 "  LogLevel ERROR\n")  # fmt: skip
    (keys / "sshd_config").write_text(f"HostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized_keys\n"
                                      "StrictModes no\nPermitRootLogin yes\nUsePAM no\nPidFile none\n")  # fmt: skip
    home = Path.home() / ".ssh"
    for folder in (home, Path("/run/sshd")):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for host in hosts.hosts:
        host.run("mount", "--bind", keys, home)  # within the namespace of this host
        host.start("/usr/sbin/sshd", "-D", "-e", "-f", keys / "sshd_config", into=shared / f"sshd_{host.name}.log")
    path = shared / "hostfile"
    path.write_text("node0 slots=1\nnode1 slots=1\n")
    (shared / "deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    deadline = time.monotonic() + 30
    while subprocess.run(hosts[0].command(["ssh", "node1", "true"]), capture_output=True).returncode:
        assert time.monotonic() < deadline, (shared / "sshd_node1.log").read_text()
        time.sleep(0.2)
    return path


def launched(hosts: Hosts, hostfile: Path, *options: str, **env: str) -> str:
    """Train by DeepSpeed's launcher from the first host; return what all ranks printed."""
    process = hosts[0].start(
        "python", "-m", "deepspeed.launcher.runner", "--hostfile", hostfile, "--master_addr", "node0",
        "--master_port", str(free_port()), *options, "examples/train_lm.py", "--deepspeed_config", "configs/zero3.json",
        *SMALL, "--steps", "3", DS_ENV_FILE=str(hostfile.with_name("deepspeed_env")), DS_ACCELERATOR="cpu", **env,
    )  # fmt: skip
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, text[-8000:]
    return text


def test_deepspeed_trains_on_two_hosts_by_ssh(hosts, ssh, trained):
    if missing("pdsh") is not None:
        pytest.skip(missing("pdsh"))
    text = launched(hosts, ssh)
    assert proof(re.sub(r"^node\d: ", "", text, flags=re.M), 3) == proof(trained[1][0], 3)


@pytest.fixture
def as_root() -> dict[str, str]:
    """Return the variables that let Open MPI run as root; without it and mpi4py the test is skipped."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("Open MPI or mpi4py not found: apt-get install openmpi-bin, pip install mpi4py")
    return {name: "1" for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")}


def test_deepspeed_trains_on_two_hosts_by_mpi(hosts, ssh, trained, as_root):
    text = launched(hosts, ssh, "--launcher", "openmpi", **as_root)
    assert proof(text, 3) == proof(trained[1][0], 3) and "[ort_zero rank 0 on node0] " in text


def test_both_hosts_aggregate_under_mpirun(hosts, ssh, trained, shared, as_root):
    process = hosts[0].start(
        "mpirun", "-np", "2", "--hostfile", ssh, "--mca", "btl_tcp_if_include", "eth0",
        "-x", "PATH", "-x", "PYTHONPATH", "-x", "MASTER_ADDR=node0", "-x", f"MASTER_PORT={free_port()}",
        "python", "-m", "ort_zero", "aggregate", trained[0], shared / "by_mpi", **as_root,
    )  # fmt: skip
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, text
    alone = shared / "one_process"
    aggregate(trained[0], alone, progress=False)
    found, wanted = (load_file(folder / "model.safetensors") for folder in (shared / "by_mpi", alone))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
