"""Options: read from the environment, refused with variable, value and fix."""

import pytest

from sgl_kimi_k3.config import Options


def test_defaults_and_values() -> None:
    assert Options.from_env({}) == Options()
    env = {"KIMI_K3_INTERVAL": "128", "KIMI_K3_CHECK": "1", "KIMI_K3_TRACE": "t.jsonl", "HOME": "/"}
    options = Options.from_env(env)
    assert (options.interval, options.check, options.trace) == (128, True, "t.jsonl")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"KIMI_K3_INTERVALS": "1"}, ["KIMI_K3_INTERVALS", "KIMI_K3_INTERVAL"]),
        ({"KIMI_K3_INTERVAL": "1k"}, ["KIMI_K3_INTERVAL='1k'", "whole number"]),
        ({"KIMI_K3_INTERVAL": "-64"}, ["KIMI_K3_INTERVAL=-64", "0 (off)"]),
        ({"KIMI_K3_INTERVAL": "100"}, ["KIMI_K3_INTERVAL=100", "KIMI_K3_GRID=64", "64 and 128"]),
        ({"KIMI_K3_OPPORTUNISTIC": "65"}, ["KIMI_K3_OPPORTUNISTIC=65", "64 and 128"]),
        ({"KIMI_K3_GRID": "0"}, ["KIMI_K3_GRID=0", "at least 1"]),
        ({"KIMI_K3_CHECK": "yes"}, ["KIMI_K3_CHECK='yes'", "0 or 1"]),
        ({"KIMI_K3_BOUNDARIES": "on"}, ["KIMI_K3_BOUNDARIES='on'", "auto, off"]),
        ({"KIMI_K3_GHOST_TOKENS": "-1"}, ["KIMI_K3_GHOST_TOKENS=-1"]),
        ({"KIMI_K3_OVERTAKE": "-1"}, ["KIMI_K3_OVERTAKE=-1", "0 (off)"]),
        ({"KIMI_K3_PROBATION": "-1"}, ["KIMI_K3_PROBATION=-1", "0 (off)"]),
    ],
)
def test_a_bad_option_is_named(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Options.from_env(env)
    assert all(word in str(caught.value) for word in words), caught.value
