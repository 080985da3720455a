"""Settings: levels as GACT's code has them, and errors that say how to mend a mistake."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import gact_dist
from gact_dist import LEVELS, Config
from gact_dist.config import Offload, from_block


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


@pytest.mark.parametrize(
    ("level", "without"),
    [("L3", "L2"), ("L4bit-swap", "L1"), ("swap", "exact"), ("actnn-L4", "actnn-L3"), ("actnn-L5", "actnn-L3.1")],
)
def test_a_level_with_offload_is_another_level_with_offload(level, without):
    config = Config.from_level(level)
    assert config.offload == Offload(enabled=True)
    assert replace(config, offload=Offload()) == Config.from_level(without)


def test_single_settings_of_offload_are_changed_beside_those_of_the_level():
    config = Config.from_level("L3", offload={"prefetch": 5})
    assert config.offload == Offload(enabled=True, prefetch=5)
    assert Config.from_dict(config.to_dict()) == config


def test_every_level_can_be_built():
    of_gact = {"L0", "L1", "L1.1", "L1.2", "L2", "L2.1", "L2.2", "L3", "L4bit-swap", "swap", "exact"}
    of_actnn = {f"actnn-{level}" for level in ("L0", "L1", "L2", "L3", "L3.1", "L4", "L5")}
    assert set(LEVELS) == of_gact | of_actnn
    for level in LEVELS:
        assert isinstance(Config.from_level(level), Config)


def test_a_level_and_another_policy_are_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"level 'L1' stands for policy 'uniform' and policy is 'gact'"):
        Config.from_level("L1", policy="gact")
    with pytest.raises(ValueError, match=r"level 'L2' stands for policy 'gact' and policy is 'uniform'"):
        from_block({"level": "L2", "policy": "uniform"})
    with pytest.raises(ValueError, match=r"level 'L2' stands for 4 bits and retained_bytes was given"):
        Config.from_level("L2", retained_bytes=10**6)
    assert from_block({"retained_bytes": 10**6}) == Config(retained_bytes=10**6)
    assert from_block({"policy": "uniform", "bits": 2}) == Config.from_level("L1.2")
    assert from_block({}) == Config.from_level("L2") == Config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 9}, "bits is 9, expected a number from 1 to 8"),
        ({"bits": 0.5}, "bits is 0.5"),
        ({"bits": float("nan")}, "bits is nan"),
        ({"policy": "uniform", "bits": 2.5}, "policies 'gact' and 'actnn' reach any average"),
        ({"policy": "gatc"}, "did you mean 'gact'"),
        ({"policy": "unifrom"}, "did you mean 'uniform'"),
        ({"policy": "ACGC"}, "did you mean 'acgc'"),
        ({"policy": "exact", "bits": 2}, "policy 'exact' was given and bits is 2, expected one of them"),
        ({"policy": "off", "bits": 4}, "policy 'off' was given and bits is 4"),
        ({"policy": "acgc"}, "policy 'acgc' was given and error was not, expected e\\^2"),
        ({"policy": "acgc", "error": 0.0}, "error is 0.0, expected a finite number above 0"),
        ({"policy": "acgc", "error": 0.25, "bits": 4}, "policy 'acgc' was given and bits is 4"),
        ({"policy": "acgc", "error": 0.25, "retained_bytes": 9}, "policy 'acgc' was given and retained_bytes is 9"),
        ({"policy": "uniform", "error": 0.25}, "policy 'uniform' was given and error is 0.25"),
        ({"estimator": "perturbations"}, "did you mean 'perturbation'"),
        ({"policy": "uniform", "estimator": "perturbation"}, "policy 'uniform' was given and estimator is"),
        ({"adapt_tolerance": -0.1}, "adapt_tolerance is -0.1, expected a finite number from 0 up"),
        ({"retained_bytes": 0}, "retained_bytes is 0, expected at least 1"),
        ({"retained_bytes": 10**6, "bits": 3}, "retained_bytes was given and bits is 3, expected one of them"),
        ({"retained_bytes": 10**6, "policy": "uniform"}, "retained_bytes was given and policy is 'uniform'"),
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
    others = (Config(policy="acgc", error=0.25), Config(retained_bytes=10**9), Config(policy="exact"))
    for other in (config, *others):
        assert Config.from_dict(other.to_dict()) == other
    with pytest.raises(TypeError):
        Config("gact")
    with pytest.raises(AttributeError):
        config.bits = 3


def test_every_field_says_what_it_is():
    lines = Path(gact_dist.config.__file__).read_text().splitlines()
    for name in [field.name for cls in (Config, Offload) for field in fields(cls)]:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        assert lines[at + 1].strip().startswith('"""'), name


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ((Config(bits=4),), TypeError, r"level is a gact_dist.Config, expected .* attach\(model, config="),
        (("L1", Config(bits=4)), ValueError, r"config and level='L1' were given, expected one of them: attach\("),
        ((None, {"bits": 4}), TypeError, "config is a dict, expected a gact_dist.Config; a dict goes through"),
    ],
)
def test_settings_given_another_way_are_an_error_that_names_the_right_one(given, error, says):
    level, config = (*given, None)[:2]
    with pytest.raises(error, match=says):
        gact_dist.attach(torch.nn.Linear(2, 2), level, config=config)


def test_single_settings_are_given_to_attach():
    def config_of(*level, **settings):
        return gact_dist.attach(torch.nn.Linear(2, 2), *level, **settings).config

    assert config_of("L2.1", adapt_interval=500) == Config(bits=3, adapt_interval=500)
    assert config_of(policy="uniform", bits=2) == Config(policy="uniform", bits=2)
    assert config_of("L2", offload={"prefetch": 5}) == Config(offload={"prefetch": 5})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"adapt_intervall": 5}, "unknown setting 'adapt_intervall', expected .* did you mean 'adapt_interval'"),
        ({"proces_group": None}, "unknown setting 'proces_group', expected .* did you mean 'process_group'"),
        ({"level": "L1", "policy": "gact"}, "level 'L1' stands for policy 'uniform' and policy is 'gact'"),
        ({"config": Config(), "bits": 3}, "config and bits=3 were given, expected one of them"),
    ],
)
def test_single_settings_that_cannot_be_used_are_an_error(settings, says):
    with pytest.raises(ValueError, match=says):
        gact_dist.attach(torch.nn.Linear(2, 2), **settings)
