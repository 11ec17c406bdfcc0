from pathlib import Path
from xml.etree import ElementTree

from lab.papers import report
from lab.papers.report import Chart, Section, write_docs

CHART = Chart("bars", "Bars & more", "x", ("a", "b"), {"paper": (1.0, -2.0), "ours": (1.5, 0.0)})


def test_a_chart_is_well_formed_and_repeatable() -> None:
    tree = ElementTree.fromstring(CHART.svg())
    bars = [e for e in tree.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    assert len(bars) == 4
    heights = [float(bar.attrib["height"]) for bar in bars]  # group by group: 1, 1.5, -2, 0
    assert heights[2] > heights[1] > heights[0] > heights[3]
    zero = float(bars[0].attrib["y"]) + heights[0]
    assert abs(float(bars[2].attrib["y"]) - zero) < 0.2  # a negative bar hangs from zero
    assert CHART.svg() == CHART.svg()


def test_the_page_shows_rows_marks_and_charts(tmp_path: Path) -> None:
    section = Section(
        "zte",
        "ZTE: two vendors",
        (report.gain("a", "Fig 9", "throughput", 17.0, 8.0), report.order("b", "Fig 7", "ratio", "yes", "yes", True)),
        (CHART,),
        ("how it was set up",),
        ("no expert parallelism",),
    )
    page, chart = write_docs(tmp_path, [section], "engine: 1")
    text = page.read_text(encoding="utf-8")
    assert "| Fig 9 | throughput | +17 % | +8 % | ✔ | ✘ |" in text
    assert "| Fig 7 | ratio | yes | yes | ✔ | – |" in text
    assert "| [ZTE](#zte-two-vendors) | 2 | 2 of 2 | 0 of 1 |" in text
    assert "![Bars & more](papers/bars.svg)" in text
    assert "### Otherwise, or not here\n\n- no expert parallelism\n" in text
    assert "engine: 1" in text
    assert chart == tmp_path / "papers" / "bars.svg"
