"""What the examples share: English prose, a small GPT-2, the lines they print. Nothing here knows ort_zero's hooks."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB = 2560
"""Number of tokens: 256 bytes, and the most frequent words."""
_PIECE = re.compile(r" ?[^\W\d_]+| ?[\d_]+| ?[^\w\s]+|\s")
"""A word, a number or punctuation, each with the space before it."""
_HELD_OUT = 10
"""One block in so many is kept for validation."""
_BLOCK = 512
"""Tokens of a block."""
_LINES = 20
"""Steps that are printed, however many there are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every example takes."""
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="samples per rank and step; default: the DeepSpeed config's")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="folder for a checkpoint at the end; default: none is saved")
    parser.add_argument(
        "--expect-ort",
        action="store_true",
        help="exit 1 unless ONNX Runtime ran every step, or was measured to be slower",
    )


@cache
def prose() -> str:
    """Return the prose of Python's own manual, which every CPython ships; code, tables and grammar are left out."""
    paragraphs = (
        " ".join(paragraph.split()) for name in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[name])
    )
    return "\n".join(text for text in paragraphs if len(text) > 60 and _share_of_letters(text) > 0.88)


def _share_of_letters(text: str) -> float:
    return sum(letter.isalpha() or letter == " " for letter in text) / len(text)


class Vocabulary:
    """Turns text into tokens and back: frequent words and punctuation are one token each, all else is spelt in bytes.

    Args:
        text: what the frequencies are counted in.
        size: number of tokens; the first 256 are the bytes.
    """

    def __init__(self, text: str, size: int = VOCAB):
        counts = Counter(_PIECE.findall(text))
        frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))[: size - 256]
        self._bytes = [bytes([value]) for value in range(256)] + [piece.encode() for piece in frequent]
        self._tokens = {piece: 256 + number for number, piece in enumerate(frequent)}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        found: list[int] = []
        for piece in _PIECE.findall(text):
            token = self._tokens.get(piece)
            found += piece.encode() if token is None else [token]
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become replacement characters."""
        return b"".join(self._bytes[token] for token in tokens if token < len(self._bytes)).decode(errors="replace")


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of the training and of the validation text."""
    tokens = torch.tensor(Vocabulary(prose()).encode(prose()))
    blocks = tokens.split(_BLOCK)
    train = [block for number, block in enumerate(blocks) if number % _HELD_OUT]
    held_out = [block for number, block in enumerate(blocks) if not number % _HELD_OUT]
    return torch.cat(train), torch.cat(held_out)


def make_batch(
    text: torch.Tensor, *, step: int, batch: int, seq: int, seed: int, rank: int, world: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return this rank's samples of one step as the model's arguments; each rank takes its own of one draw."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq, (world * batch,), generator=generator)[rank * batch : (rank + 1) * batch]
    ids = torch.stack([text[start : start + seq] for start in starts.tolist()]).long().to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def make_model(*, layers: int, hidden: int, seq: int, seed: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with random weights, the same on every rank."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=seq,
        n_embd=hidden,
        n_layer=layers,
        n_head=max(1, hidden // 32),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers warns that it cannot tell it from the name of the class
    return model


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as the process group says."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of every rank's loss."""
    total = loss.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


class StepPrinter:
    """Prints a line for each step on rank 0, of a long run for some steps.

    The seconds are those of a step, on average since the line before.
    """

    def __init__(self, steps: int):
        self._steps = steps
        self._every = max(1, steps // _LINES)
        self._last = 0
        self._start = time.perf_counter()

    def __call__(self, step: int, loss: float) -> None:
        if step != 1 and step != self._steps and step % self._every:
            return
        now = time.perf_counter()
        if rank_and_world()[0] == 0:
            width = len(str(self._steps))
            seconds = (now - self._start) / max(1, step - self._last)
            print(f"step {step:>{width}}/{self._steps}  loss {loss:.4f}  {seconds:.3f} s", flush=True)
        self._start = time.perf_counter()
        self._last = step


def print_proof(forwards: int, config: Mapping[str, Any]) -> bool:
    """Print on rank 0 what executed the model; return True if ONNX Runtime did, in every training step.

    Args:
        forwards: number of training forwards that the example asked for.
        config: the DeepSpeed config.
    """
    try:
        import ort_zero
    except ImportError:
        status: dict[str, Any] = {"models": [], "fallbacks": 0, "reason": "ort_zero is not installed"}
    else:
        status = ort_zero.status()
    lines = []
    proved = False
    for model in status["models"]:
        lines.append(f"backend: {model['backend']}, ZeRO stage {model['zero_stage']}")
        if model["engine"] == "compile":
            lines.append(_compiled(model))
            proved |= _ran_in_ort(model, forwards, config)
        else:
            runs = model["graph_runs"]
            proved |= min(runs.get("forward", 0), runs.get("backward", 0)) >= forwards
            lines.append(f"{model['engine']}: {len(model['units'])} unit(s), {_runs(runs)}")
    if not status["models"]:
        lines.append(f"backend: torch ({status['reason'] or 'the config asks for nothing else'})")
    lines.append(f"fallbacks: {status['fallbacks']}")
    if rank_and_world()[0] == 0:
        print("\n".join(lines), flush=True)
    return proved and status["fallbacks"] == 0


def share_in_onnxruntime() -> float | None:
    """Return the share of the newest model's floating-point operations that ONNX Runtime runs; None without any."""
    try:
        import ort_zero
    except ImportError:
        return None
    models = ort_zero.status()["models"]
    return models[-1]["compiled"]["flop_share"] if models else None


def _compiled(model: Mapping[str, Any]) -> str:
    """Return a line about a model of the compile backend: units, graphs, segments, and what ONNX Runtime runs of it."""
    compiled, runs = model["compiled"], model["graph_runs"]
    share = compiled["flop_share"]
    operations = "" if share is None else f" with {share:.0%} of the floating-point operations"
    faster = compiled["units_in_torch"]
    back = f"; measured to be faster in PyTorch: {', '.join(faster)}" if faster else ""
    return (
        f"torch.compile: {len(model['units'])} unit(s), {compiled['graphs']} graphs, "
        f"{compiled['segments'] - compiled['segments_in_torch']} of {compiled['segments']} segments in ONNX Runtime"
        f"{operations}, {_runs(runs)}{back}"
    )


def _runs(runs: Mapping[str, int]) -> str:
    return f"{runs.get('forward', 0)} forward and {runs.get('backward', 0)} backward runs"


def _ran_in_ort(model: Mapping[str, Any], forwards: int, config: Mapping[str, Any]) -> bool:
    """Return whether ONNX Runtime ran a part of each training step: most of it where the config places all there.

    Units that were measured to be faster in PyTorch have run in ONNX Runtime until then, which is enough.
    """
    compiled, runs = model["compiled"], model["graph_runs"]
    place = config.get("ort_zero", {}).get("compile", {}).get("place", "measured")
    if place == "measured" and compiled["units_in_torch"]:
        return min(runs.get("forward", 0), runs.get("backward", 0)) > 0
    return (
        min(runs.get("forward", 0), runs.get("backward", 0)) >= forwards
        and compiled["segments"] > compiled["segments_in_torch"]
        and (compiled["flop_share"] or 0) > (0.5 if place == "ort" else 0)
    )


def exit_status(proved: bool, args: argparse.Namespace) -> int:
    """Return the exit status of the example, and say why it is not 0."""
    if proved or not args.expect_ort:
        return 0
    if rank_and_world()[0] == 0:
        print("error: --expect-ort was given, but ONNX Runtime did not run every step", file=sys.stderr)
    return 1
