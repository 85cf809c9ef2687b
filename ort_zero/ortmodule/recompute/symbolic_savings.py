"""Shortens the sums by which ORT says what a recomputation saves."""

from __future__ import annotations

from collections import Counter


def shortened_symbolic(text: str) -> str:
    """Return ORT's sum of savings with equal terms counted: ``"8 x (batch*seq*2048) * 4"``."""
    count = Counter(_plain(term) for term in _terms(text))
    return " + ".join(f"{n} x {term}" if n > 1 else term for term, n in count.items() if term != "0")


def _terms(text: str) -> list[str]:
    """Return the terms of a sum, however many brackets are around it and around its parts."""
    text = text.strip()
    while text.startswith("(") and _encloses(text):
        text = text[1:-1].strip()
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            found.append(text[start:i])
            start = i + 1
    if not found:
        return [text]
    return [term for part in (*found, text[start:]) for term in _terms(part)]


def _plain(term: str) -> str:
    """Return a product without ORT's inner brackets and its factor of 1."""
    flat = term.replace("* 1.000000", "").strip()
    return flat.replace(")*(", "*").replace("((", "(").replace("))", ")").strip()


def _encloses(text: str) -> bool:
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth and i < len(text) - 1:
            return False
    return True
