"""API keys."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gateway import auth
from gateway.auth import ApiKey, KeyRates, KeyRing, create_key, digest_of, load_keys
from gateway.table import LocalTable
from shared.errors import Busy, InvalidRequest, Unauthorized


def test_a_key_is_kept_only_as_its_digest() -> None:
    secret, key = create_key("team")
    assert secret not in repr(key)
    assert key.digest == digest_of(secret)
    assert create_key("team")[0] != secret


def test_without_keys_everybody_is_let_in() -> None:
    assert KeyRing(()).identify("") is None


def test_the_right_key_is_found_in_either_header() -> None:
    secret, key = create_key("team")
    ring = KeyRing((key,))
    assert ring.identify(f"Bearer {secret}") == key
    assert ring.identify(f"bearer  {secret} ") == key
    assert ring.identify("", secret) == key


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic abc", "\x00", "Bearer " + "x" * 10_000])
def test_a_wrong_key_is_refused(header: str) -> None:
    _, key = create_key("team")
    with pytest.raises(Unauthorized):
        KeyRing((key,)).identify(header)


def test_a_keys_file_is_read(tmp_path: Path) -> None:
    _, key = create_key("team", 2.0, 5)
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([{"name": key.name, "digest": key.digest, "requests_per_s": 2.0, "burst": 5}]))
    assert load_keys(file) == (key,)


@pytest.mark.parametrize(
    "text", ["- {name: a}", "- {name: a, digest: short}", "{", "- {name: a, digest: x, nope: 1}", "- 5"]
)
def test_a_broken_keys_file_names_itself(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"keys\.yaml"):
        load_keys(file)


@pytest.mark.parametrize(
    "text",
    [
        "- {name: a, key: pp-planted}",
        "- {name: a, pp:pp-planted}",
        "- {name: a, digest: pp-planted}",
        "- {name: a, digest: {pp-planted}",
        "- {name: a, cache_salt: *pp-planted}",
        "- {name: a, cache_salt: !pp-planted x}",
        "- name: a\n  key: pp-planted\n digest: b",
        "- pp-planted",
        "pp-planted",
        "a: pp-planted",
    ],
)
def test_what_is_wrong_with_a_keys_file_repeats_no_secret_of_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"keys\.yaml") as error:
        load_keys(file)
    assert "planted" not in error.value.message


def test_a_key_may_have_a_class_of_its_own_and_be_kept_to_some(tmp_path: Path) -> None:
    _, key = create_key("nightly")
    file = tmp_path / "keys.yaml"
    more = {"slo": "batch", "classes": ["slow"], "weight": 2.0}
    file.write_text(yaml.safe_dump([{"name": key.name, "digest": key.digest, **more}]))
    (read,) = load_keys(file)
    assert [read.may_use(slo) for slo in ("batch", "slow", "default")] == [True, True, False]
    assert [key.may_use(slo) for slo in ("batch", "default")] == [True, True]
    ring = KeyRing((read,))
    assert ring.weights == {"nightly": 2.0}
    ring.require_classes(("default", "batch", "slow"))
    with pytest.raises(InvalidRequest, match="'nightly': no SLO class 'slow'"):
        ring.require_classes(("default", "batch"))
    file.write_text(yaml.safe_dump([{"name": key.name, "digest": key.digest, "weight": 0}]))
    with pytest.raises(InvalidRequest, match="'nightly' needs a weight"):
        load_keys(file)


def test_a_missing_keys_file_is_an_error_not_an_open_door(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        load_keys(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("requests_per_s: 271828-x", "entry 1: Expected `float`, got `str` - at `$.requests_per_s`"),
        ("burst: [271828]", "entry 1: Expected `int`, got `array` - at `$.burst`"),
        ("weight: {a: 271828}", "entry 1: Expected `float`, got `object` - at `$.weight`"),
        ("classes: [271828]", "entry 1: Expected `str`, got `int` - at `$.classes[0]`"),
        ("role: !271828 x", ":3: 0.role: a tag"),
        ("name: 271828", ":3: 0.name: it is here twice, first in line 1"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_and_not_repeated(tmp_path: Path, more: str, says: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- name: a\n  digest: {'0' * 63}a\n  {more}\n")
    with pytest.raises(InvalidRequest) as error:
        load_keys(file)
    assert error.value.message.startswith(f"keys file {file}")
    assert says in error.value.message
    assert "271828" not in error.value.message


def test_keys_compare_by_value() -> None:
    assert ApiKey("a", "b") == ApiKey("a", "b")


def test_a_role_at_the_dashboard_is_one_that_there_is(tmp_path: Path) -> None:
    _, key = create_key("anna", role="operate")
    file = tmp_path / "keys.yaml"
    entry = {"name": key.name, "digest": key.digest}
    file.write_text(yaml.safe_dump([{**entry, "role": "operate"}]))
    assert load_keys(file) == (key,)
    file.write_text(yaml.safe_dump([{**entry, "role": "admin"}]))
    with pytest.raises(InvalidRequest, match=r"'anna' has the role 'admin'; known: look, operate"):
        load_keys(file)


def _write(file: Path, *keys: ApiKey, text: str = "") -> None:
    file.write_text(text or yaml.safe_dump([{"name": k.name, "digest": k.digest, "weight": k.weight} for k in keys]))


def test_a_key_that_leaves_the_file_opens_nothing_and_a_new_one_opens(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    (first, kept), (second, revoked), (third, added) = (create_key(name) for name in ("kept", "revoked", "added"))
    _write(file, kept, revoked)
    ring = KeyRing.of_file(file)
    weights = ring.weights
    assert ring.identify(f"Bearer {second}") == revoked
    _write(file, kept, replace(added, weight=3.0))
    ring.reread()
    with pytest.raises(Unauthorized, match="wrong API key"):
        ring.identify(f"Bearer {second}")
    assert ring.identify(f"Bearer {first}") == kept
    assert ring.identify(f"Bearer {third}").name == "added"  # type: ignore[union-attr]
    assert weights == {"kept": 1.0, "added": 3.0}


def test_a_ring_that_had_keys_never_opens_to_everybody(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    _, key = create_key("only")
    _write(file, key)
    ring = KeyRing.of_file(file)
    _write(file, text="[]")
    ring.reread()
    assert not ring.open
    with pytest.raises(Unauthorized):
        ring.identify("")


@pytest.mark.parametrize("text", ["{", "- 5", "- {name: a, digest: x}", ""])
def test_a_file_that_turned_bad_or_is_missing_leaves_the_keys_as_they_were(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    secret, key = create_key("kept")
    _write(file, key)
    ring = KeyRing.of_file(file)
    if text:
        _write(file, text=text)
    else:
        file.unlink()
    ring.reread()
    assert ring.identify(f"Bearer {secret}") == key
    newer, other = create_key("newer")
    _write(file, other)
    ring.reread()
    assert ring.identify(f"Bearer {newer}") == other


def test_a_reread_key_needs_a_class_that_there_is(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secret, key = create_key("kept")
    _write(file, key)
    ring = KeyRing.of_file(file)
    ring.require_classes(["default"])
    _write(file, text=yaml.safe_dump([{"name": key.name, "digest": key.digest, "slo": "nope"}]))
    ring.reread()
    assert ring.identify(f"Bearer {secret}") == key


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    (_, kept), (secret, revoked) = create_key("kept"), create_key("revoked")
    _write(file, kept, revoked)

    def changed_meanwhile(path: Path) -> tuple[ApiKey, ...]:
        found = load_keys(path)
        _write(file, kept)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(auth, "load_keys", changed_meanwhile)
        ring = KeyRing.of_file(file)
    ring.reread()
    with pytest.raises(Unauthorized):
        ring.identify(f"Bearer {secret}")


def test_the_rate_of_a_key_refills_with_time() -> None:
    now = 1.0
    rates, key = KeyRates(LocalTable(), lambda: now), ApiKey("a", "", requests_per_s=2.0, burst=2)

    def refused_for_s() -> float:
        try:
            rates.check(key)
        except Busy as error:
            return error.retry_after_s or 0.0
        return 0.0

    assert [refused_for_s() for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
    now = 1.5
    assert refused_for_s() == 0.0
    now = 100.0
    assert [refused_for_s() for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
