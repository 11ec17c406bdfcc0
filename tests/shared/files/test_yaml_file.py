"""YAML that people wrote: what PyYAML repairs, repeats without end or answers with a traceback is refused by line."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.files import yaml_file
from shared.files.yaml_file import MAX_REPEATED, parse_document, parse_yaml, read_document, read_yaml

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}], k{n}: 1}}\n" for n in range(1, 40)
)

_bounded = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def said(text: str) -> str:
    with pytest.raises(InvalidRequest) as error:
        parse_document(text, "f.yaml")
    return error.value.message


def test_what_a_file_says() -> None:
    text = "a: 1\nb: [x, 2.5, true, ~, 2026-01-02, '1', =, <<]\nc: &c {d: e, f: g}\nh: {<<: *c, f: 2}\ni: *c\n1: j\n"
    found = parse_document(text, "f.yaml")
    assert found.content == {
        "a": 1,
        "b": ["x", 2.5, True, None, date(2026, 1, 2), "1", "=", "<<"],
        "c": {"d": "e", "f": "g"},
        "h": {"d": "e", "f": 2},
        "i": {"d": "e", "f": "g"},
        1: "j",
    }
    assert found.mapping()["1"] == "j"
    assert found.places.tell("h.d", "x") == "f.yaml:3: h.d: x"
    assert found.places.tell("h.f", "x") == "f.yaml:4: h.f: x"
    assert parse_document("", "f.yaml").mapping() == {}


def test_of_merged_mappings_the_first_counts() -> None:
    text = "a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b], z: 3}\nd: {<<: *b, <<: *a}\n"
    found = parse_yaml(text, "f.yaml")
    assert found["c"] == {"x": 1, "y": 2, "z": 3}
    assert found["d"] == {"x": 2, "y": 2}


def test_a_byte_order_mark_is_not_a_key(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("\ufeffname: x\n", encoding="utf-8")
    assert read_yaml(tmp_path / "f.yaml") == {"name": "x"}
    (tmp_path / "f.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(InvalidRequest, match=r"f\.yaml:1: not text in UTF-8"):
        read_document(tmp_path / "f.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: !planted x\n", "f.yaml:2: b: a tag (`!name`) is not read: write text that begins with ! in quotes"),
        ("a: 1\nb: !planted [x]\n", "f.yaml:2: b: a tag (`!name`) is not read: leave it out"),
        ("!planted\na: 1\n", "f.yaml:1: a tag (`!name`) is not read: leave it out"),
        ("a: !!python/object:os.x {}\n", "f.yaml:1: a: a tag (`!name`) is not read: leave it out"),
        ("a: !!set {x, y}\n", "f.yaml:1: a: a tag (`!name`) is not read: leave it out"),
        ("a: 1\n? [b]\n: 2\n", "f.yaml:2: a key must be text, not a list"),
        ("a: 1\n? {b: 1}\n: 2\n", "f.yaml:2: a key must be text, not a mapping"),
        ("a: &a [b]\n? *a\n: 2\n", "f.yaml:1: a key must be text, not a list"),
        ("a: &planted 1\nb: &planted 2\n", "f.yaml:2: not valid YAML: found duplicate anchor"),
        ("a: &a {b: *a}\n", "f.yaml:1: an alias inside of what it names would never end"),
        ("a: 1\nb: &b [[[*b]]]\n", "f.yaml:2: an alias inside of what it names would never end"),
        ("a: *b\n", "f.yaml:1: an alias (`*name`) without an anchor (`&name`): quote text that begins with *"),
        ("a: 1\nb: {c: 1, d: 2,\n c: 3}\n", "f.yaml:3: b.c: it is here twice, first in line 2"),
        ("a: [{b: 1}, {b: 1, b: 2}]\n", "f.yaml:1: a.1.b: it is here twice, first in line 1"),
        ("1: a\n'1': b\n", "f.yaml:2: 1: it is here twice, first in line 1"),
        ("1: a\n1.0: b\n", "f.yaml:2: 1.0: it is here twice, first in line 1"),
        ("a: {<<: 3}\n", "f.yaml:1: a: `<<` takes a mapping, or a list of mappings"),
        ("a: {<<: [{b: 1}, c]}\n", "f.yaml:1: a: `<<` takes a mapping, or a list of mappings"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document (`---`) is not read: one file is one document"),
        ("a: 1\nb: 2026-99-99\n", "f.yaml:2: b: a date or a number that cannot be read: write text in quotes"),
        ("a: !!bool maybe\n", "f.yaml:1: a: a date or a number that cannot be read: write text in quotes"),
        ("a: !!timestamp maybe\n", "f.yaml:1: a: a date or a number that cannot be read: write text in quotes"),
        ("a: " + "9" * 5000, "f.yaml:1: a: a date or a number that cannot be read: write text in quotes"),
        ("a: " + "9" * 400, "f.yaml:1: a: a whole number of more than 64 bits: write text in quotes"),
        ("a: 1\nb: \x07\n", "f.yaml:2: not valid YAML: unacceptable character #x0007"),
        ("\ud800: 1\n", "f.yaml: it has characters that are not text"),
        ("- a\n", "f.yaml: expected a mapping of keys at the top"),
        ("a: x\nb: !planted y\nc: !planted z\n", "f.yaml:2: b: a tag"),
    ],
)
def test_what_is_refused_and_where(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_yaml(text, "f.yaml")
    assert error.value.message.startswith(message)
    assert "planted" not in error.value.message


def test_all_faults_of_one_kind_are_listed_up_to_a_bound() -> None:
    many = "".join(f"k{number}: !x y\n" for number in range(99))
    assert said("a: 1\na: 2\nb: 3\nb: 4\n").count("here twice") == 2
    assert len(said(many).split("\n")) == yaml_file._FAULTS


@pytest.mark.parametrize("text", [LAUGHS, MERGES], ids=["laughs", "merges"])
def test_aliases_are_not_followed_for_ever(text: str) -> None:
    """Each value is counted when an alias repeats it, before anything is made of it."""
    found = said(text)
    assert found.startswith("f.yaml:")
    assert f"at most {MAX_REPEATED:,}" in found


def test_usual_aliases_are_far_below_the_bound() -> None:
    text = "x: &x {a: 1, b: 2, c: {d: 3}}\ny:\n" + "- *x\n" * 5000
    assert len(parse_yaml(text, "f.yaml")["y"]) == 5000


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "a: " + "[" * 70 + "]" * 70])
def test_depth_is_bounded(text: str) -> None:
    assert said(text).startswith("f.yaml:1: ")


_TOKENS = ["a", "b: ", "- ", "? ", ": ", "[", "]", "{", "}", ", ", "&a ", "*a", "!t ", "!!int ", "<<: ", "\n", "\n  "]
_TOKENS += ['"', "'", "|\n", "# ", "---\n", "...\n", "%YAML 1.1\n", "1", "0x", ".inf", "2026-01-01", "~", "\t", "="]
_TOKENS += ["@", "\u2028"]


@given(text=st.lists(st.sampled_from(_TOKENS), max_size=14).map("".join) | st.text(max_size=40))
@_bounded
def test_any_text_is_read_as_pyyaml_does_or_refused_by_name(text: str) -> None:
    try:
        found = parse_document(text, "f.yaml")
    except InvalidRequest as error:
        found = None
        assert_is_of_file(error.message)
    if found is not None:
        assert repr(found.content) == repr(yaml.load(text, Loader=yaml_file._LOADER)) or "=" in text or "<<" in text


def assert_is_of_file(message: str) -> None:
    message.encode()
    for line in message.split("\n"):
        assert line.startswith(("f.yaml:", "f.yaml: "))


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)


@given(value=_plain)
@_bounded
def test_what_is_written_is_read(value: Any) -> None:
    assert parse_document(yaml.safe_dump(value), "f.yaml").content == value
