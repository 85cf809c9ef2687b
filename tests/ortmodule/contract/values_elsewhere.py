"""Values of a program that stand in another file than its models."""

from __future__ import annotations


class Config:
    scale, calls = 1.0, 0

    class Inner:
        scale = 1.0


COUNT = 0
table: dict = {}


def tick() -> int:
    Config.calls += 1
    return Config.calls


def count() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def reset() -> None:
    global COUNT
    COUNT = Config.calls = 0
    Config.scale = Config.Inner.scale = 1.0
    table.clear()
