"""One reader for text that others wrote: encodings, ends of lines, gzip, JSON in records, limits."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.files import text as reader
from shared.files.text import format_of, parse_json, read_json, read_lines, read_records, read_text, shown

SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e"  # at which `str.splitlines` cuts, and no reader of files does

_bounded = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
_scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


def write(folder: Path, content: bytes, name: str = "f") -> Path:
    file = folder / name
    file.write_bytes(content)
    return file


def listed(file: Path) -> list[Any]:
    return [record for _, record in read_records(file)]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_lines_end_where_files_end_them(tmp_path: Path, separator: str) -> None:
    file = write(tmp_path, f"a{separator}b\nc\r\n\n d \re".encode())
    assert list(read_lines(file)) == [(1, f"a{separator}b"), (2, "c"), (4, " d "), (5, "e")]


@pytest.mark.parametrize("separator", SEPARATORS[:3])
def test_records_hold_any_character(tmp_path: Path, separator: str) -> None:
    rows = [{"text": f"a{separator}b"}, {"text": "c"}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert listed(write(tmp_path, lines.encode())) == rows
    assert listed(write(tmp_path, json.dumps(rows, ensure_ascii=False).encode())) == rows


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_and_gzip_are_not_content(tmp_path: Path, mark: bytes, packed: bool) -> None:
    content = mark + b'{"a": 1}\n'
    file = write(tmp_path, gzip.compress(content) if packed else content)  # whatever its name says
    assert read_text(file) == '{"a": 1}\n'
    assert listed(file) == [{"a": 1}]
    assert read_json(file) == {"a": 1}


def test_items_of_a_list_have_their_lines(tmp_path: Path) -> None:
    text = '\n[\n {"a": 1},\n {"a":\n  2}\n, 3]\n'
    assert list(read_records(write(tmp_path, text.encode()))) == [(3, {"a": 1}), (4, {"a": 2}), (6, 3)]
    assert listed(write(tmp_path, b"[]")) == []
    assert listed(write(tmp_path, b" \n")) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfea\0", r"f: not text in UTF-8 but in UTF-16"),
        (b"a\nb\r\nc\rd \xff\n", r"f:4: not text in UTF-8"),
        (b"a\nb\0\n", r"f:2: a NUL character"),
        (gzip.compress(b"1\n" * 99, mtime=0)[:-9], r"f: cannot be read: it is not whole gzip"),
        (b"\x1f\x8bnot", r"f: cannot be read: it is not whole gzip"),
        (b'{"a": 1}\n{"a": \n', r"f:2: not JSON: Expecting value"),
        (b'{"a": 1}\n[1] 2\n', r"f:2: not JSON: Extra data"),
        (b'{\n"a": 1}\n', r"f:1: not JSON: .*; expected one record a line, or a list"),
        (b'{"a": 1, "b": 2, "a": 3}\n', r"f:1: not JSON: the key 'a' is there twice"),
        (b'[\n1,\n{"a": 1, "a": 3}]', r"f:3: not JSON: the key 'a' is there twice"),
        (b"[\n1,\nx]", r"f:3: not JSON: Expecting value"),
        (b"[1,\n2", r"f:2: not JSON: Expecting ',' delimiter"),
        (b"[1\n2]", r"f:2: not JSON: Expecting ',' delimiter"),
        (b"[1,\n]", r"f:[12]: not JSON: (Expecting value|Illegal trailing comma)"),
        (b"[1]\n[2]\n", r"f:2: not JSON: Extra data"),
        (b"[" * 100_000, r"f:1: not JSON: nested too deeply"),
        (b'{"a":' * 100_000, r"f:1: not JSON: nested too deeply"),
        (b"[1,\n" + b"9" * 5000 + b"]", r"f:2: not JSON: a number has too many digits"),
    ],
    ids=lambda one: one if isinstance(one, str) else "content",
)
def test_errors_name_file_and_line(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        listed(write(tmp_path, content))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / ("x" * 999)):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            read_text(path)


def test_what_is_too_long_once_unpacked_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, gzip.compress(b" " * (1 << 22)))
    assert file.stat().st_size < 1 << 14
    with pytest.raises(InvalidRequest, match=r"longer than 1,000,000 bytes, unpacked"):
        read_text(file, 1_000_000)


def test_a_character_across_two_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_CHUNK", 2)
    assert read_text(write(tmp_path, "a€\r\n€\n".encode())) == "a€\n€\n"
    with pytest.raises(InvalidRequest, match=r"f:3: a NUL"):
        read_text(write(tmp_path, b"a\r\nb\r\n\0"))
    with pytest.raises(InvalidRequest, match=r"f:2: not text"):
        read_text(write(tmp_path, "a\n€".encode()[:-1]))


def test_a_models_config_keeps_the_last_of_a_key(tmp_path: Path) -> None:
    assert read_json(write(tmp_path, b'{"a": 1, "a": 2}')) == {"a": 2}
    with pytest.raises(InvalidRequest, match=r"f:2: not JSON"):
        read_json(write(tmp_path, b'{"a":\n'))


def test_the_format_is_in_the_name() -> None:
    assert [format_of(Path(name)) for name in ("a.json", "a.jsonl.gz", "a.gz", "a.jsonl.1")] == [
        ".json",
        ".jsonl",
        "",
        ".1",
    ]


def test_what_a_message_repeats_is_short_and_printable() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list"
    assert shown(10**5000) == "a int"
    assert shown("\ud800\n") == r"'\ud800\n'"
    assert len(shown("x" * 999)) == 61


@given(rows=st.lists(_values.filter(lambda value: not isinstance(value, list)), max_size=6), ascii=st.booleans())
@_bounded
def test_any_records_are_read_as_written(tmp_path: Path, rows: list[Any], ascii: bool) -> None:
    def encode(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii)

    whole = encode(rows)
    lines = "".join(encode(row) + "\n" for row in rows)
    for content in (whole, lines):
        raw = content.encode(errors="surrogatepass")
        assert listed(write(tmp_path, raw)) == rows


@given(lines=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n")), max_size=5))
@_bounded
def test_any_lines_are_read_as_written(tmp_path: Path, lines: list[str]) -> None:
    file = write(tmp_path, "".join(f"{line}\r\n" for line in ["x", *lines]).encode())
    assert [line for _, line in read_lines(file)] == ["x", *(line for line in lines if line.strip())]


def refusal(read: Callable[[], object]) -> str:
    """What is said against a file, as bytes can be printed; empty if nothing is."""
    try:
        read()
    except InvalidRequest as error:
        return error.message.encode().decode()
    return ""


def _mangled() -> st.SearchStrategy[bytes]:
    whole = b'[{"a": 1, "b": "\\u0041\xc3\xa9"},\n {"a": [2, null, 1e5]},\r\n{}]'
    cut = st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)), st.binary(max_size=4))
    return cut.map(lambda at: whole[: at[0]] + at[2] + whole[at[1] :])


@given(content=st.binary(max_size=64) | _mangled() | _mangled().map(gzip.compress))
@_bounded
def test_any_bytes_are_read_or_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path, content)

    for read in (lambda: listed(file), lambda: list(read_lines(file)), lambda: read_json(file)):
        said = refusal(read)
        assert not said or said.startswith(f"{file}:")


def test_half_a_surrogate_pair_is_kept_for_its_user_to_judge() -> None:
    assert parse_json('"\\ud800"', "x") == "\ud800"
