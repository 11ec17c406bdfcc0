from dashboard.requests_page import label, waterfall
from shared.timeline import RequestTimeline, Span, SpanRecord


def test_bars_follow_the_time() -> None:
    spans = [
        SpanRecord(Span.DECODE, 10.08, 10.4, "d0"),
        SpanRecord(Span.QUEUE, 10.0, 10.01, "p0"),
        SpanRecord(Span.PREFILL, 10.01, 10.08, "p0"),
    ]
    figure = waterfall(RequestTimeline("job", 10.0, first_token_s=10.08, spans=spans))
    assert list(figure.layout.yaxis.ticktext) == ["queue · p0", "prefill · p0", "decode · d0"]
    assert [round(bar.base[0], 3) for bar in figure.data] == [0, 10, 80]
    assert [round(bar.x[0], 3) for bar in figure.data] == [10, 70, 320]
    assert round(figure.layout.shapes[0].x0, 3) == 80


def test_every_stretch_has_a_colour() -> None:
    spans = [SpanRecord(span, 10.0, 10.1) for span in Span]
    assert len(waterfall(RequestTimeline("job", 10.0, spans=spans)).data) == len(Span)


def test_nothing_happened() -> None:
    figure = waterfall(RequestTimeline("job", 10.0))
    assert len(figure.data) == 0
    assert not figure.layout.shapes


def test_clocks_that_disagree() -> None:
    figure = waterfall(RequestTimeline("job", 10.0, spans=[SpanRecord(Span.TRANSFER, 9.9, 9.8, "d0")]))
    assert figure.data[0].x[0] == 0
    assert figure.layout.xaxis.range[0] < -199 < 0 < figure.layout.xaxis.range[1]


def test_a_later_attempt_says_so_and_names_are_harmless() -> None:
    assert label(SpanRecord(Span.DECODE_QUEUE, 0, 1, "<b>d1", 2)) == "decode queue · &lt;b&gt;d1 · attempt 2"
