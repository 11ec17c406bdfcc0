import gzip
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.sim.traces import FORMATS, answers_of, read_trace

Write = Callable[..., Path]

PLAIN = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def test_plain_csv(write: Write) -> None:
    workload = read_trace(write(PLAIN + "0.5,10,20\n2,30,40\n"))
    assert workload.name == "trace.csv"
    assert workload.arrival_s.tolist() == [0.5, 2.0]
    assert workload.prompt_tokens.tolist() == [10, 30]
    assert workload.output_tokens.tolist() == [20, 40]
    assert workload.prefixes is None


def test_plain_json_lines(write: Write) -> None:
    row = '{{"arrival_s": {}, "prompt_tokens": 7, "output_tokens": 3, "note": "x"}}\n'
    workload = read_trace(write(row.format(0) + "\n" + row.format(1.25), "t.jsonl"))
    assert workload.arrival_s.tolist() == [0.0, 1.25]


def test_azure_dates_count_from_the_first(write: Write) -> None:
    rows = "2023-11-16 23:59:59.6805900,374,44\n2023-11-17 00:00:01,396,109\n2023-11-17 00:00:01.5+00:00,1,2\n"
    assert read_trace(write(AZURE + rows)).arrival_s == pytest.approx([0.0, 1.31941, 1.81941])


def test_burstgpt_with_further_columns(write: Write) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    workload = read_trace(write(header + "5,,1.5,ChatGPT,472,18,490,Conversation log\n45,,2,GPT-4,10,2,12,API log\n"))
    assert workload.arrival_s.tolist() == [0.0, 40.0]
    assert workload.prompt_tokens.tolist() == [472, 10]


def test_burstgpt_failures_are_refused_or_left_out(write: Write) -> None:
    text = BURST + "5,ChatGPT,0,0,0,API log\n9,ChatGPT,472,18,490,API log\n11,GPT-4,3,0,3,API log\n12,GPT-4,3,1,4,x\n"
    path = write(text)
    with pytest.raises(InvalidRequest, match=r"trace\.csv:2: Request tokens 0 is less than 1 \(skip_empty"):
        read_trace(path)
    workload = read_trace(path, skip_empty=True)
    assert workload.name == "trace.csv (2 empty requests left out)"
    assert workload.arrival_s.tolist() == [0.0, 3.0]
    assert workload.output_tokens.tolist() == [18, 1]


def test_mooncake_prefixes(write: Write) -> None:
    row = '{{"timestamp": {}, "input_length": 600, "output_length": 2, "hash_ids": {}}}\n'
    workload = read_trace(write(row.format(1000, [4, 5]) + row.format(3500, [4, 6])))
    assert workload.arrival_s.tolist() == [0.0, 2.5]
    assert workload.prefixes == ((4, 5), (4, 6))
    assert workload.prefix_block_tokens == 512


def test_token_counts_all_arrive_at_once(write: Write) -> None:
    workload = read_trace(write("num_prefill_tokens,num_decode_tokens,pd_ratio\n74,918,0.08\n2,3,0.7\n"))
    assert workload.arrival_s.tolist() == [0.0, 0.0]


def test_sort_puts_times_in_order_and_keeps_the_order_of_equals(write: Write) -> None:
    path = write(PLAIN + "2,1,1\n1,2,1\n1,3,1\n0,4,1\n")
    with pytest.raises(InvalidRequest, match=r"trace\.csv:3: arrival_s 1 is earlier than the line before"):
        read_trace(path)
    assert read_trace(path, sort=True).prompt_tokens.tolist() == [4, 2, 3, 1]


def test_sorted_public_traces_start_at_zero(write: Write) -> None:
    path = write(BURST + "9,a,1,1,2,x\n5,a,2,1,3,x\n")
    assert read_trace(path, sort=True).arrival_s.tolist() == [0.0, 4.0]


@pytest.mark.parametrize("end", ["", "\n", "\n\n \n"])
def test_blank_lines_at_the_end_are_nothing(write: Write, end: str) -> None:
    assert len(read_trace(write("\ufeff\n" + PLAIN + "0,1,1\n1,2,2" + end))) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PLAIN + "0,1,1\n1,,1\n", r":3: prompt_tokens is missing"),
        (PLAIN + "0,1,1\n\n1,1,1\n", r":3: prompt_tokens is missing"),
        (PLAIN + "0,1,1\n,1,1\n", r":3: arrival_s is missing"),
        (PLAIN + "0,1,1\n1,1\n", r":3: output_tokens is missing"),
        (PLAIN + "0,1,-3\n", r":2: output_tokens -3 is negative"),
        (PLAIN + "0,1,1\n1,1,0\n", r":3: output_tokens 0 is less than 1"),
        (PLAIN + "0,1,ten\n", r":2: output_tokens 'ten' is not a number"),
        (PLAIN + "0,true,1\n", r":2: prompt_tokens True is not a number"),
        (PLAIN + "0,1.5,1\n", r":2: prompt_tokens 1.5 is not a whole number"),
        (PLAIN + "0,1,1\n0,99999999999999999999999,1\n", r":3: prompt_tokens '9+' is more than"),
        (PLAIN + "0,5000000000,1\n", r":2: prompt_tokens 5000000000 is more than"),
        (PLAIN + "inf,1,1\n", r":2: arrival_s inf is not a finite number"),
        (PLAIN + "-1,1,1\n", r":2: arrival_s -1 is less than 0"),
        (PLAIN + "0,1,1\n1,1,1,1\n", r"Expected 3 fields in line 3, saw 4"),
        (PLAIN + "0,1,1,1\n1,1,1,1\n", r"more fields than the header"),
        (PLAIN + "0,1,1\n1,2\x000,1\n", r":3: a NUL character"),
        (PLAIN + f"0,1,1\n0,{'9' * 400},1\n", r":3: prompt_tokens '9+… is not a finite number"),
        (PLAIN + "0,1,1\n0,1_0,1\n", r":3: prompt_tokens '1_0' is not a number"),
        (PLAIN + "0,1,1\n1e12,1,1\n", r":3: arrival_s 1000000000000.0 is more than 100 years after the start"),
        (BURST + "0,x,1,1,2,x\n1e12,x,1,1,2,x\n", r":3: Timestamp 1000000000000.0 is more than 100 years"),
        (AZURE + "1700-01-01 00:00:00,1,1\n2200-01-01 00:00:00,1,1\n", r":3: TIMESTAMP '2200.*' is more than 100"),
        (AZURE + "2200-01-01 00:00:00,1,1\n1700-01-01 00:00:00,1,1\n", r":3: TIMESTAMP '1700.*' is more than 100"),
        (AZURE + "2023-01-01 00:00:00,1,1\n9999-01-01 00:00:00,1,1\n", r":3: TIMESTAMP '9999.*' is not a date"),
        (PLAIN, r"no requests"),
        (PLAIN + "\n\n", r"no requests"),
        ("", r"the file is empty"),
        (" \n\n", r"the file is empty"),
        ("time,prompt\n1,2\n", r":1: the keys time, prompt are of no known format; known: azure \(TIMESTAMP"),
        ("arrival_s,prompt_tokens,prompt_tokens,output_tokens\n1,2,2,2\n", r"named twice"),
        (AZURE + "2023-11-16 18:15:46,1,1\nyesterday,1,1\n", r":3: TIMESTAMP 'yesterday' is not a date"),
        (AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", r":3: TIMESTAMP .* is earlier"),
        (AZURE + "2023-11-16 18:15:46,1,1\n,1,1\n", r":3: TIMESTAMP is missing"),
        (BURST + "5,ChatGPT,0,0,0,API log\n", r":2: Request tokens 0"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\nnot json\n', r":2: not JSON"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n[1]\n', r":2: not a JSON object"),
        (
            '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n\n{"arrival_s": 0, "prompt_tokens": 1}\n',
            r":3: output_tokens is missing",
        ),
        ('{"arrival_s": 0, "prompt_tokens": [1], "output_tokens": 1}\n', r":1: prompt_tokens .* is not a number"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}\n', r":1: hash_ids"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
            '{"timestamp": 0, "input_length": 1, "output_length": 1}\n',
            r":2: hash_ids is missing",
        ),
    ],
)
def test_errors_name_line_and_key(write: Write, text: str, says: str) -> None:
    path = write(text)
    with pytest.raises(InvalidRequest, match=says) as error:
        read_trace(path)
    assert str(path) in error.value.message


MOON = '{{"timestamp": {}, "input_length": 1000, "output_length": 2{}}}\n'


def moon(*times: object, more: str = "") -> str:
    return "".join(MOON.format(time, more) for time in times)


@pytest.mark.parametrize("without", [0, 1, 2])
def test_prefixes_that_one_record_lacks_are_an_error_on_its_line(write: Write, without: int) -> None:
    rows = [moon(at, more="" if at == without else ', "hash_ids": [1, 2]') for at in range(3)]
    with pytest.raises(InvalidRequest, match=rf":{without + 1}: hash_ids is missing"):
        read_trace(write("".join(rows)))
    assert read_trace(write(moon(0, 1, 2))).prefixes is None


def test_more_blocks_than_the_prompt_holds_are_of_another_size(write: Write) -> None:
    path = write(moon(0, more=', "hash_ids": [1, 2]') + moon(1, more=', "hash_ids": [1, 2, 3]'))
    with pytest.raises(InvalidRequest, match=r":2: hash_ids \[1, 2, 3\] has more blocks of 512 tokens than the prompt"):
        read_trace(path)
    read = read_trace(path, block_tokens=256)
    assert read.prefixes == ((1, 2), (1, 2, 3))
    assert read.prefix_block_tokens == 256


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ((0, 0.5, 1.25), r":2: timestamp 0.5 is no whole millisecond; the times look like seconds"),
        ((1_700_000_000, 1_700_000_003), r":1: timestamp 1700000000 is a date in seconds"),
        ((0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3), r"timestamp: 11 requests within 3 milliseconds; the times look"),
    ],
)
def test_seconds_are_not_taken_for_milliseconds(write: Write, times: tuple[float, ...], says: str) -> None:
    path = write(moon(*times))
    with pytest.raises(InvalidRequest, match=says):
        read_trace(path)
    seconds = [time - times[0] for time in times]
    assert read_trace(path, time_unit="s").arrival_s.tolist() == seconds
    assert read_trace(path, time_unit="ms").arrival_s.tolist() == pytest.approx([time / 1000 for time in seconds])


def test_a_unit_is_of_times_that_are_numbers(write: Write) -> None:
    assert read_trace(write(PLAIN + "0,1,1\n500,1,1\n"), time_unit="ms").arrival_s.tolist() == [0.0, 0.5]
    assert read_trace(write(moon(1_700_000_000_000, 1_700_000_000_250))).arrival_s.tolist() == [0.0, 0.25]
    with pytest.raises(InvalidRequest, match="time_unit must be one of s, ms, not 'h'"):
        read_trace(write(PLAIN + "0,1,1\n"), time_unit="h")
    with pytest.raises(InvalidRequest, match="time_unit is for traces whose times are numbers"):
        read_trace(write(AZURE + "2023-11-16 18:15:46,1,1\n"), time_unit="s")


def test_gzip_and_lists_of_records(write: Write, tmp_path: Path) -> None:
    plain = read_trace(write(PLAIN + "0,1,1\n1,2,2\n"))
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress((PLAIN + "0,1,1\n1,2,2\n").encode()))
    assert read_trace(packed).arrival_s.tolist() == plain.arrival_s.tolist()
    rows = [moon(at, more=', "hash_ids": [1, 2]').strip() for at in (0, 500)]
    listed = read_trace(write("[\n" + ",\n".join(rows) + "\n]"))
    assert listed.arrival_s.tolist() == [0.0, 0.5]
    assert listed.prefixes == ((1, 2), (1, 2))
    with pytest.raises(InvalidRequest, match=r":3: hash_ids is missing"):
        read_trace(write("[\n" + ",\n".join((rows[0], moon(500).strip())) + "\n]"))
    with pytest.raises(InvalidRequest, match=r":1: no requests"):
        read_trace(write("[]"))


def test_numbers_in_json_are_plain(write: Write) -> None:
    row = '{{"arrival_s": 0, "prompt_tokens": {}, "output_tokens": 1}}\n'
    assert read_trace(write(row.format('" 12 "'))).prompt_tokens.tolist() == [12]
    for bad in ('"1\\u00002"', "10" * 200, '"1_0"', '"0x10"', "1e400", "[" * 900 + "]" * 900, '"\\ud800"'):
        with pytest.raises(InvalidRequest, match=r":2: prompt_tokens .* is not a") as error:
            read_trace(write(row.format(5) + row.format(bad)))
        assert len(error.value.message.encode()) < 400
    with pytest.raises(InvalidRequest, match=":1: not JSON: nested too deeply"):
        read_trace(write(row.format("[" * 100_000)))


_CELLS = st.sampled_from(
    ["0", "1", "2.5", "-1", "1e9", "1e400", "9" * 400, "nan", "inf", "", " ", '"a"', '"1', "\0", "2023-11-16 18:15:46"]
) | st.text(max_size=4)


def _csv_text() -> st.SearchStrategy[str]:
    rows = st.lists(st.lists(_CELLS, min_size=1, max_size=4).map(",".join), max_size=4).map("\n".join)
    return st.tuples(st.sampled_from([PLAIN, AZURE, BURST, "num_prefill_tokens,num_decode_tokens\n", ""]), rows).map(
        "".join
    )


def _json_text() -> st.SearchStrategy[str]:
    keys = [key for form in FORMATS.values() if form.records for key in (*form.keys, form.prefixes) if key]
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    )
    rows = st.lists(st.dictionaries(st.sampled_from(keys), values, max_size=6), max_size=4)
    whole = rows.map(json.dumps)
    return whole | rows.map(lambda each: "\n".join(map(json.dumps, each))) | whole.map(lambda text: text[:-3])


@given(text=_csv_text() | _json_text(), sort=st.booleans(), skip_empty=st.booleans())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_a_workload_or_refused_by_name(write: Write, text: str, sort: bool, skip_empty: bool) -> None:
    path = write(text.encode(errors="replace").decode())
    try:
        read = read_trace(path, sort=sort, skip_empty=skip_empty)
    except InvalidRequest as error:
        said = error.message
    else:
        said = f"{path}:"
        assert np.isfinite(read.arrival_s).all()
        assert read.prompt_tokens.min() >= 1
    assert f"{path}:" in said
    said.encode()


def test_all_requests_empty(write: Write) -> None:
    with pytest.raises(InvalidRequest, match="all 1 requests are empty"):
        read_trace(write(PLAIN + "0,0,1\n"), skip_empty=True)


def test_a_format_may_be_named(write: Write) -> None:
    path = write(PLAIN + "0,1,1\n")
    assert len(read_trace(path, "csv")) == 1
    with pytest.raises(InvalidRequest, match="unknown trace format 'excel'; known: azure"):
        read_trace(path, "excel")
    with pytest.raises(InvalidRequest, match="key 'TIMESTAMP' of format 'azure' is missing"):
        read_trace(path, "azure")
    with pytest.raises(InvalidRequest, match="'jsonl' is JSON, one object a line or a list"):
        read_trace(path, "jsonl")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_trace(tmp_path / "b.csv")


def test_no_two_formats_have_the_same_keys() -> None:
    assert len({(form.records, form.keys) for form in FORMATS.values()}) == len(FORMATS)


def test_a_million_rows_are_read_in_seconds(tmp_path: Path) -> None:
    count = 1_000_000
    rows = np.column_stack((np.arange(count), np.full(count, 900), np.full(count, 200)))
    path = tmp_path / "big.csv"
    np.savetxt(path, rows, fmt="%d", delimiter=",", header=PLAIN.strip(), comments="")
    started = perf_counter()
    assert len(read_trace(path)) == count
    assert perf_counter() - started < 10.0


def test_the_public_azure_trace(traces: Path) -> None:
    started = perf_counter()
    workload = read_trace(traces / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    assert perf_counter() - started < 1.0
    assert len(workload) == 19366
    head = workload.head(1000)
    assert (head.prompt_tokens.mean(), head.output_tokens.mean()) == pytest.approx((1014, 247), abs=1)  # Cronus


def test_the_public_mooncake_trace(traces: Path) -> None:
    workload = read_trace(traces / "mooncake" / "conversation_trace.jsonl")
    assert len(workload) == 12031
    assert workload.prefixes is not None
    blocks = [len(ids) for ids in workload.prefixes]
    assert blocks == (-(-workload.prompt_tokens // 512)).tolist()
    assert workload.arrival_s[-1] == pytest.approx(3537, abs=1)
    assert workload.answers is not None
    assert sum(map(bool, workload.answers)) == 2327


@pytest.mark.parametrize(
    ("case", "prompts", "answers"),
    [
        ("the next turn repeats the answer", [(25, 20, (1, 2, 3)), (50, 5, (1, 2, 4, 5, 6))], [(4, 5), ()]),
        ("as far as its blocks are whole", [(25, 20, (1, 2, 3)), (49, 5, (1, 2, 4, 5, 6))], [(4, 5), ()]),
        ("its last token is not computed", [(25, 16, (1, 2, 3)), (50, 5, (1, 2, 4, 5, 6))], [(4, 5), ()]),
        ("none is filled", [(25, 5, (1, 2, 3)), (50, 5, (1, 2, 4, 5, 6))], [(), ()]),
        ("no next turn", [(25, 20, (1, 2, 3)), (50, 5, (7, 8, 9, 10, 11))], [(), ()]),
        (
            "prompts that go on in several ways",
            [(25, 20, (1, 2, 3)), (50, 5, (1, 2, 4, 5, 6)), (45, 5, (1, 2, 7, 8, 9))],
            [(), (), ()],
        ),
        ("what is older is no answer", [(50, 5, (1, 2, 4, 5, 6)), (25, 20, (1, 2, 3))], [(), ()]),
        ("shorter than a block", [(5, 20, (1,)), (50, 5, (2, 3, 4, 5, 6))], [(), ()]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_by_the_prompts_that_repeat_them(
    case: str, prompts: list[tuple[int, int, tuple[int, ...]]], answers: list[tuple[int, ...]]
) -> None:
    tokens, outputs, ids = zip(*prompts, strict=True)
    assert list(answers_of(ids, np.array(tokens), np.array(outputs), 10)) == answers


def test_the_public_token_counts(traces: Path) -> None:
    file = traces / "token_counts" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    assert len(read_trace(file)) == 30731
