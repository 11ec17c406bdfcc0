"""API keys, and their file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import auth
from gateway.auth import ApiKey, KeyRates, KeyRing, create_key, digest_of, load_keys
from gateway.table import LocalTable
from shared.errors import Busy, InvalidRequest, Unauthorized

SECRET, KEY = create_key("team")
OTHER_SECRET, OTHER = create_key("other")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def entry(key: ApiKey = KEY, **more: Any) -> dict[str, Any]:
    return {"name": key.name, "digest": key.digest, **more}


def write(file: Path, *entries: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(list(entries)))


def opens(ring: KeyRing, secret: str) -> bool:
    try:
        return ring.identify(f"Bearer {secret}") is not None
    except Unauthorized:
        return False


def test_a_key_is_kept_only_as_its_digest() -> None:
    assert SECRET not in repr(KEY)
    assert KEY.digest == digest_of(SECRET)
    assert OTHER_SECRET != SECRET


def test_the_right_key_is_found_in_either_header() -> None:
    ring = KeyRing((KEY,))
    for header in ((f"Bearer {SECRET}",), (f"bearer  {SECRET} ",), ("", SECRET)):
        assert ring.identify(*header) == KEY
    assert KeyRing(()).identify("") is None, "without keys each request is admitted"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic abc", "\x00", "Bearer " + "x" * 10_000])
def test_a_wrong_key_is_refused(header: str) -> None:
    with pytest.raises(Unauthorized):
        KeyRing((KEY,)).identify(header)


def test_a_keys_file_is_read(file: Path) -> None:
    write(file, entry(requests_per_s=2.0, burst=5, role="operate"))
    assert load_keys(file) == (replace(KEY, requests_per_s=2.0, burst=5, role="operate"),)


PLANTED = ("- {name: a, key: pp-planted}", "- {name: a, pp:pp-planted}", "- {name: a, digest: pp-planted}")
PLANTED += ("- {name: a, digest: {pp-planted}", "- {name: a, cache_salt: *pp-planted}", "- pp-planted", "pp-planted")
PLANTED += ("- {name: a, cache_salt: !pp-planted x}", "- name: a\n  key: pp-planted\n digest: b", "a: pp-planted")
BROKEN = ("- {name: a}", "- {name: a, digest: short}", "{", "- {name: a, digest: x, nope: 1}", "- 5", *PLANTED)


@pytest.mark.parametrize("text", [*BROKEN, None])
def test_a_broken_or_missing_keys_file_is_named_and_no_secret_of_it_repeated(file: Path, text: str | None) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"keys\.yaml") as error:
        load_keys(file)
    assert "planted" not in error.value.message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("requests_per_s: 271828-x", "entry 1: Expected `float`, got `str` - at `$.requests_per_s`"),
        ("burst: [271828]", "entry 1: Expected `int`, got `array` - at `$.burst`"),
        ("weight: {a: 271828}", "entry 1: Expected `float`, got `object` - at `$.weight`"),
        ("classes: [271828]", "entry 1: Expected `str`, got `int` - at `$.classes[0]`"),
        ("role: !271828 x", ":3: 0.role: a tag"),
        ("name: 271828", ":3: 0.name: it is here twice, first in line 1"),
        ("weight: 0", "'a' needs a weight"),
        ("role: admin", "'a' has the role 'admin'; known: look, operate"),
    ],
)
def test_a_wrong_value_is_named_and_not_repeated(file: Path, more: str, message: str) -> None:
    file.write_text(f"- name: a\n  digest: {'0' * 63}a\n  {more}\n")
    with pytest.raises(InvalidRequest) as error:
        load_keys(file)
    assert error.value.message.startswith(f"keys file {file}")
    assert message in error.value.message
    assert "271828" not in error.value.message


def test_a_key_may_have_a_class_a_weight_and_a_list_of_classes(file: Path) -> None:
    write(file, entry(slo="batch", classes=["slow"], weight=2.0))
    ring = KeyRing.of_file(file)
    (read,) = load_keys(file)
    assert [read.may_use(slo) for slo in ("batch", "slow", "default")] == [True, True, False]
    assert [KEY.may_use(slo) for slo in ("batch", "default")] == [True, True]
    assert ring.weights == {"team": 2.0}
    ring.require_classes(("default", "batch", "slow"))
    with pytest.raises(InvalidRequest, match="'team': no SLO class 'slow'"):
        ring.require_classes(("default", "batch"))


def test_a_changed_file_revokes_and_adds_keys(file: Path) -> None:
    added_secret, added = create_key("added")
    write(file, entry(), entry(OTHER))
    ring = KeyRing.of_file(file)
    weights = ring.weights
    assert opens(ring, OTHER_SECRET)
    write(file, entry(), entry(added, weight=3.0))
    ring.reread()
    assert [opens(ring, secret) for secret in (SECRET, OTHER_SECRET, added_secret)] == [True, False, True]
    assert weights == {"team": 1.0, "added": 3.0}
    write(file)
    ring.reread()
    assert not ring.open
    assert not any(opens(ring, secret) for secret in (SECRET, "")), "a ring that had keys stays closed"


UNKNOWN_CLASS = f"- {{name: team, digest: {'0' * 64}, slo: nope}}"


@pytest.mark.parametrize("text", ["{", "- 5", "- {name: a, digest: x}", "", UNKNOWN_CLASS])
def test_a_file_that_turned_bad_or_is_missing_leaves_the_keys_as_they_were(file: Path, text: str) -> None:
    write(file, entry())
    ring = KeyRing.of_file(file)
    ring.require_classes(["default"])
    if text:
        file.write_text(text)
    else:
        file.unlink()
    ring.reread()
    assert opens(ring, SECRET)
    write(file, entry(OTHER))
    ring.reread()
    assert opens(ring, OTHER_SECRET)


def test_a_file_that_changes_while_it_is_read_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, entry(), entry(OTHER))

    def changed_meanwhile(path: Path) -> tuple[ApiKey, ...]:
        keys = load_keys(path)
        write(file, entry())
        return keys

    with monkeypatch.context() as patched:
        patched.setattr(auth, "load_keys", changed_meanwhile)
        ring = KeyRing.of_file(file)
    ring.reread()
    assert not opens(ring, OTHER_SECRET)


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
