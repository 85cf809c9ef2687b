"""Two hosts, which are namespaces of this machine, share the graphs in a folder that both see."""

from __future__ import annotations

import re

from test_two_hosts import SMALL, config, hosts, on_both, pytestmark, shared, torchrun  # noqa: F401


def losses(text: str, steps: int) -> list[str]:
    """Return the losses that rank 0 printed; ONNX Runtime ran every step."""
    assert "backend: onnxruntime, ZeRO stage 3" in text and "fallbacks: 0" in text, text
    assert f"{steps} forward and {steps} backward runs" in text, text
    return re.findall(r"^step\s+\d+/\d+\s+loss (\S+)", text, re.M)


def test_both_hosts_load_the_graphs_that_an_earlier_run_left_in_a_shared_folder(hosts, shared):  # noqa: F811
    own = config(shared / "cached.json", "zero3.json", ortmodule={"cache_dir": str(shared / "graphs")})
    found = []
    for _ in range(2):
        command = torchrun(["examples/train_lm.py", "--deepspeed_config", own, *SMALL, "--steps", "2"])
        texts = on_both(hosts, command, ORT_ZERO_LOG_LEVEL="DEVINFO")
        found.append(losses(texts[0], 2))
        verb = "loaded" if len(found) == 2 else "exported"
        for rank, text in enumerate(texts):
            assert re.search(rf"ort_zero rank {rank}.*training graph 1: {verb} in", text), text[-6000:]
    assert found[0] == found[1]
