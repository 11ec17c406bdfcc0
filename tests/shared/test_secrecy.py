"""What an error message may repeat of a file."""

from typing import Any

import pytest
import yaml

from shared.secrecy import may_be_secret, shown_key, yaml_fault


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("instances", 0, "env", "ANYTHING"), 5),
        (("gateway", "env"), "HF_TOKEN=hf"),
        (("curve_secret",), 5),
        (("cluster_token",), 5),
        (("database_url",), 5),
        (("tracing", "endpoint"), "collector"),
        (("instances", 0, "engine_args", "hf_token"), 5),
        (("instances", 0, "monitor"), "http://user:word@host"),
        (("name",), "user:word@host"),
    ],
)
def test_a_value_that_may_be_secret(path: tuple[str | int, ...], value: Any) -> None:
    assert may_be_secret(path, value)


@pytest.mark.parametrize(("path", "value"), [(("gateway", "port"), 0), (("name",), "a@b"), (("environment",), "x")])
def test_a_value_that_may_be_shown(path: tuple[str | int, ...], value: Any) -> None:
    assert not may_be_secret(path, value)


@pytest.mark.parametrize(("key", "shown"), [("HF_TOKEN:hf", "HF_TOKEN…"), ("HF_TOKEN=hf", "HF_TOKEN…"), ("a b", "a b")])
def test_a_key_is_shown_without_what_was_meant_as_its_value(key: str, shown: str) -> None:
    assert shown_key(key) == shown


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
@pytest.mark.parametrize(
    "value",
    ["*planted", "!planted x", "!planted!y x", "!!planted x", "{planted[", "'planted", '"\\qplanted"', "@planted"],
)
def test_what_yaml_says_has_none_of_the_file(loader: Any, value: str) -> None:
    with pytest.raises(yaml.YAMLError) as error:
        yaml.load(f"a: 1\nb: {value}\n", Loader=loader)
    said = yaml_fault("c.yaml", error.value)
    assert "planted" not in said
    assert said.startswith(("c.yaml:2: not valid YAML: ", "c.yaml:3: not valid YAML: "))


def test_what_yaml_says_of_its_own_marks_is_kept() -> None:
    with pytest.raises(yaml.YAMLError) as error:
        yaml.safe_load("a: {b: 1\nc: 2\n")
    said = "c.yaml:2: not valid YAML: while parsing a flow mapping, expected ',' or '}', but got ':'"
    assert yaml_fault("c.yaml", error.value) == said


def test_a_character_that_yaml_does_not_allow() -> None:
    with pytest.raises(yaml.YAMLError) as error:
        yaml.safe_load("a: planted\0")
    said = yaml_fault("c.yaml", error.value)
    assert said == "c.yaml: not valid YAML: unacceptable character #x0000: special characters are not allowed"
