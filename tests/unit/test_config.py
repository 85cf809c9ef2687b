"""The "ort_zero" section: defaults, and errors that name the dotted path."""

from __future__ import annotations

import pytest

from ort_zero import config
from ort_zero.errors import ConfigError


def test_no_section_and_disabled_section_give_none():
    assert config.section_of({"train_batch_size": 4}) is None
    assert config.section_of({"ort_zero": {"enabled": False}}) is None
    assert config.section_of(None) is None
    assert config.section_of({"ort_zero": {}}) is not None


@pytest.mark.parametrize(("section", "path", "value", "near"), [
    ({"enabeld": True}, "ort_zero.enabeld", "True", '"enabled"'),
    ({"fall_back": "warn"}, "ort_zero.fall_back", "'warn'", '"fallback"'),
    ({"statistics": {"outputdir": "x"}}, "ort_zero.statistics.outputdir", "'x'", '"output_dir"'),
    ({"compile": {"zzzzzz": 1}}, "ort_zero.compile.zzzzzz", "1", "valid keys: "),
])  # fmt: skip
def test_unknown_key_names_path_value_and_nearest_key(section, path, value, near):
    with pytest.raises(ConfigError) as error:
        config.parse(section)
    message = str(error.value)
    assert path in message and value in message and near in message


@pytest.mark.parametrize(("section", "answer"), [
    ({"place": "ort"}, '"compile.place" or "ortmodule.place"?'),
    ({"plaec": "ort"}, '"compile.place" or "ortmodule.place"?'),
    ({"verfy": "off"}, '"compile.verify"?'),
    ({"compile": {"exclude": ["head"]}}, '"exclude"?'),
    ({"memory": {"enabled": True}}, '"enabled" or "statistics.enabled"?'),
])  # fmt: skip
def test_a_right_key_in_a_wrong_place_is_answered_with_its_path(section, answer):
    with pytest.raises(ConfigError) as error:
        config.parse(section)
    assert f"did you mean {answer}" in str(error.value)


@pytest.mark.parametrize(("section", "path", "value"), [
    ({"enabled": "yes"}, "ort_zero.enabled", "'yes'"),
    ({"enabled": 1}, "ort_zero.enabled", "1"),
    ({"fallback": "ignore"}, "ort_zero.fallback", "'ignore'"),
    ({"backend": "onnx"}, "ort_zero.backend", "'onnx'"),
    ({"compile": {"max_unit_elements": 0}}, "ort_zero.compile.max_unit_elements", "0"),
    ({"compile": {"max_unit_elements": "8"}}, "ort_zero.compile.max_unit_elements", "'8'"),
    ({"log_level": "LOUD"}, "ort_zero.log_level", "'LOUD'"),
    ({"save_onnx": 3}, "ort_zero.save_onnx", "3"),
    ({"compile": True}, "ort_zero.compile", "True"),
    ({"metrics": {"every": 0}}, "ort_zero.metrics.every", "0"),
    ({"metrics": {"path": 5}}, "ort_zero.metrics.path", "5"),
])  # fmt: skip
def test_wrong_value_names_path_and_value(section, path, value):
    with pytest.raises(ConfigError) as error:
        config.parse(section)
    assert f"{path}: " in str(error.value) and value in str(error.value)


@pytest.mark.parametrize("section", [None, True, [], "on"])
def test_section_must_be_an_object(section):
    with pytest.raises(ConfigError, match="must be an object"):
        config.parse(section)


@pytest.mark.parametrize("name", ["ort-zero", "Ort_Zero", "ORT_ZERO", "ortzero"])
def test_misspelt_section_is_refused_with_the_right_name(name):
    with pytest.raises(ConfigError) as error:
        config.section_of({name: {}})
    assert f'"{name}"' in str(error.value) and 'did you mean "ort_zero"' in str(error.value)


@pytest.mark.parametrize("value", ["all", "FastGelu+:1:2", ["Add+:1:-1"], "plan.json"])
def test_recomputation_is_ort_s(value):
    assert config.parse({"memory": {"recompute": value}, "backend": "ortmodule"}).engine() == "ortmodule"
    with pytest.raises(ConfigError, match='ort_zero.memory.recompute: .* the backend is "torch"'):
        config.parse({"memory": {"recompute": value}, "backend": "torch"}).engine()


@pytest.mark.parametrize(
    ("backend", "other"), [("compile", "ortmodule"), ("ortmodule", "compile"), ("torch", "compile")]
)
def test_keys_of_another_engine_are_refused(backend, other):
    with pytest.raises(
        ConfigError, match=rf'ort_zero.{other}.place: a key of "backend": "{other}", and the backend is'
    ):
        config.parse({"backend": backend, other: {"place": "ort"}}).engine()


def test_checkpoints_are_sharded_unless_told_otherwise():
    assert config.parse({}).checkpoint.sharded and not config.parse({}).checkpoint.async_save
    with pytest.raises(ConfigError, match=r'ort_zero.checkpoint: "async_save" needs "sharded": true'):
        config.parse({"checkpoint": {"sharded": False, "async_save": True}})


@pytest.mark.parametrize("compile, words", [
    ({"runners": ["ort", "fast"]}, r"ort_zero.compile.runners.1: Input should be 'ort', 'inductor' or 'torch'"),
    ({"runners": []}, "ort_zero.compile.runners: List should have at least 1 item"),
    ({"runners": ["torch"]}, 'ort_zero.compile.runners: must have "ort" or "inductor"; PyTorch runs the model'),
    ({"place": "ort", "runners": ["inductor"]}, 'ort_zero.compile.runners: must have "ort", since "place"'),
])  # fmt: skip
def test_runners_that_cannot_be(compile: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        config.parse({"compile": compile})
