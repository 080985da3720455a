"""Settings: levels as GACT's code has them, and errors that say how to mend a mistake."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

import gact_dist
from gact_dist import LEVELS, Config
from gact_dist.config import Offload


@pytest.mark.parametrize(
    ("level", "policy", "bits"),
    [
        ("L1", "uniform", 4), ("L1.1", "uniform", 8), ("L1.2", "uniform", 2),
        ("L2", "gact", 4), ("L2.1", "gact", 3), ("L2.2", "gact", 2), ("L3", "gact", 4), ("L4bit-swap", "uniform", 4),
    ],
)  # fmt: skip
def test_levels_are_those_of_gact(level, policy, bits):
    config = Config.from_level(level)
    assert (config.policy, config.bits) == (policy, bits)


@pytest.mark.parametrize(("level", "without"), [("L3", "L2"), ("L4bit-swap", "L1"), ("swap", "exact")])
def test_a_level_with_offload_is_another_level_with_offload(level, without):
    config = Config.from_level(level)
    assert config.offload == Offload(enabled=True)
    assert replace(config, offload=Offload()) == Config.from_level(without)


def test_single_settings_of_offload_are_changed_beside_those_of_the_level():
    config = Config.from_level("L3", offload={"prefetch": 5})
    assert config.offload == Offload(enabled=True, prefetch=5)
    assert Config.from_dict(config.to_dict()) == config


def test_every_level_can_be_built():
    assert set(LEVELS) == {"L0", "L1", "L1.1", "L1.2", "L2", "L2.1", "L2.2", "L3", "L4bit-swap", "swap", "exact"}
    for level in LEVELS:
        assert isinstance(Config.from_level(level), Config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 9}, "bits is 9, expected a number from 1 to 8"),
        ({"bits": 0.5}, "bits is 0.5"),
        ({"bits": float("nan")}, "bits is nan"),
        ({"policy": "uniform", "bits": 2.5}, "policy 'gact' reaches any average"),
        ({"policy": "gatc"}, "did you mean 'gact'"),
        ({"group_size": 100}, "group_size is 100, expected one of 64, 128, 256, 512"),
        ({"adapt_interval": 0}, "adapt_interval is 0, expected at least 1"),
        ({"calibration_samples": 0}, "calibration_samples is 0"),
        ({"offload": {"prefetch": -1}}, "offload.prefetch is -1, expected at least 0"),
        ({"offload": {"prefech": 1}}, "unknown key 'prefech' in offload.*did you mean 'prefetch'"),
        ({"offload": {"enabled": True}, "policy": "off"}, "offload.enabled is true with policy"),
        ({"adapt_intervall": 3}, "unknown setting 'adapt_intervall'.*did you mean 'adapt_interval'"),
    ],
)
def test_wrong_values_say_what_was_got_and_what_was_expected(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.from_dict(settings)


@pytest.mark.parametrize(
    "settings", [{"bits": "4"}, {"bits": True}, {"seed": 1.5}, {"min_numel": "many"}, {"offload": True}]
)
def test_wrong_types_are_type_errors(settings):
    with pytest.raises(TypeError, match="expected"):
        Config.from_dict(settings)


def test_a_config_is_frozen_keyword_only_and_survives_a_round_trip():
    config = Config(bits=2.5, adapt_interval=10, seed=3)
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(TypeError):
        Config("gact")
    with pytest.raises(AttributeError):
        config.bits = 3


def test_every_field_says_what_it_is():
    lines = Path(gact_dist.config.__file__).read_text().splitlines()
    for name in [field.name for cls in (Config, Offload) for field in fields(cls)]:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        assert lines[at + 1].strip().startswith('"""'), name
