"""The "ort_zero" section: defaults, and errors that name the dotted path."""

from __future__ import annotations

import pytest

from ort_zero import config
from ort_zero.errors import ConfigError


def test_defaults_run_in_onnxruntime_and_refuse_fallback():
    parsed = config.parse({})
    assert parsed.enabled and parsed.ortmodule.enabled
    assert parsed.ortmodule.fallback == "raise"
    assert parsed.ortmodule.exclude == [] and parsed.ortmodule.graph_cache_size == 8
    assert parsed.ortmodule.cache_dir == "auto"
    assert parsed.ortmodule.cache_key is None and parsed.ortmodule.save_onnx is None
    assert parsed.statistics.enabled is False and parsed.memory.recompute == "off"
    assert parsed.memory_efficient_gradients is False


def test_no_section_and_disabled_section_give_none():
    assert config.section_of({"train_batch_size": 4}) is None
    assert config.section_of({"ort_zero": {"enabled": False}}) is None
    assert config.section_of(None) is None
    assert config.section_of({"ort_zero": {}}) is not None


@pytest.mark.parametrize(
    ("section", "path", "value", "near"),
    [
        ({"enabeld": True}, "ort_zero.enabeld", "True", '"enabled"'),
        ({"ortmodule": {"fall_back": "warn"}}, "ort_zero.ortmodule.fall_back", "'warn'", '"fallback"'),
        ({"statistics": {"outputdir": "x"}}, "ort_zero.statistics.outputdir", "'x'", '"output_dir"'),
    ],
)
def test_unknown_key_names_path_value_and_nearest_key(section, path, value, near):
    with pytest.raises(ConfigError) as error:
        config.parse(section)
    message = str(error.value)
    assert path in message and value in message and near in message


def test_unknown_key_without_a_near_one_lists_the_valid_keys():
    with pytest.raises(ConfigError, match="valid keys: .*graph_cache_size"):
        config.parse({"ortmodule": {"zzzzzz": 1}})


@pytest.mark.parametrize(
    ("section", "path", "value"),
    [
        ({"enabled": "yes"}, "ort_zero.enabled", "'yes'"),
        ({"enabled": 1}, "ort_zero.enabled", "1"),
        ({"ortmodule": {"fallback": "ignore"}}, "ort_zero.ortmodule.fallback", "'ignore'"),
        ({"ortmodule": {"graph_cache_size": 0}}, "ort_zero.ortmodule.graph_cache_size", "0"),
        ({"ortmodule": {"cache_key": 7}}, "ort_zero.ortmodule.cache_key", "7"),
        ({"ortmodule": {"graph_cache_size": "8"}}, "ort_zero.ortmodule.graph_cache_size", "'8'"),
        ({"ortmodule": {"log_level": "LOUD"}}, "ort_zero.ortmodule.log_level", "'LOUD'"),
        ({"ortmodule": {"save_onnx": 3}}, "ort_zero.ortmodule.save_onnx", "3"),
        ({"ortmodule": True}, "ort_zero.ortmodule", "True"),
    ],
)
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


@pytest.mark.parametrize("value", ["auto", "FastGelu+:1:2", ["Add+:1:-1"], "plan.json"])
def test_recomputation_is_ort_s(value):
    assert config.parse({"memory": {"recompute": value}}).memory.recompute == value
    with pytest.raises(ConfigError, match=r'ort_zero: "memory.recompute" .* needs "ortmodule": \{"enabled": true\}'):
        config.parse({"memory": {"recompute": value}, "ortmodule": {"enabled": False}})


def test_checkpoints_are_sharded_unless_told_otherwise():
    assert config.parse({}).checkpoint.sharded and not config.parse({}).checkpoint.async_save
    with pytest.raises(ConfigError, match=r'ort_zero.checkpoint: "async_save" needs "sharded": true'):
        config.parse({"checkpoint": {"sharded": False, "async_save": True}})


def test_level_is_accepted_in_lower_case():
    assert config.parse({"ortmodule": {"log_level": "devinfo"}}).ortmodule.log_level == "DEVINFO"
