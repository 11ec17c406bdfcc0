from lab.papers import report
from lab.papers.report import Check, Row, Section, as_result, told_in_words


def held(row: Row) -> dict[Check, bool]:
    return dict(row.checks)


def test_a_gain_needs_its_sign_and_thirty_percent() -> None:
    near = report.gain("k", "Fig 1", "x", -50.0, -36.0)
    assert held(near) == {Check.SIGN: True, Check.MAGNITUDE: True}
    assert held(report.gain("k", "Fig 1", "x", -50.0, -34.0)) == {Check.SIGN: True, Check.MAGNITUDE: False}
    assert held(report.gain("k", "Fig 1", "x", -50.0, 40.0)) == {Check.SIGN: False, Check.MAGNITUDE: False}
    assert near.paper == "-50"
    nothing = report.gain("k", "Fig 1", "x", -50.0, -1.1e-14)  # a sum in another order
    assert (nothing.ours, held(nothing)[Check.SIGN]) == ("+0", False)
    assert report.points("k", "F", "x", 0.0, -1.1e-14, 5.0).ours == "+0"


def test_the_gain_of_a_ratio_is_its_distance_from_one() -> None:
    assert held(report.ratio_gain("k", "T", "x", 2.0, 1.71)) == {Check.SIGN: True, Check.MAGNITUDE: True}
    assert held(report.ratio_gain("k", "T", "x", 2.0, 1.69)) == {Check.SIGN: True, Check.MAGNITUDE: False}
    assert held(report.ratio_gain("k", "T", "x", 0.8, 1.01)) == {Check.SIGN: False, Check.MAGNITUDE: False}
    assert held(report.ratio_gain("k", "T", "x", 0.8, 0.75)) == {Check.SIGN: True, Check.MAGNITUDE: True}


def test_other_kinds_of_rows() -> None:
    assert held(report.factor("k", "F", "x", 8.0, 10.3)) == {Check.SIGN: True, Check.MAGNITUDE: True}
    assert held(report.value("k", "T", "x", "ms", 100.0, 116.0, 0.15)) == {Check.MAGNITUDE: False}
    assert held(report.points("k", "F", "x", 0.0, -9.0, 10.0)) == {Check.MAGNITUDE: True}
    assert held(report.between("k", "F", "x", "%", 16.0, 30.0, 31.0)) == {Check.MAGNITUDE: False}
    assert report.between("k", "F", "x", "x", 10.0, float("inf"), 30.0).paper == "> 10"
    assert report.informative("k", "T", "x", "ms", "12", 13.0).met


def test_misses_stay_with_their_note() -> None:
    section = Section(
        "zte",
        "ZTE: x",
        (report.gain("gain_1", "Fig 9", "x", 17.0, 8.0), report.informative("eq", "eq", "y", "ms", "1", 2.0)),
    )
    result = as_result([told_in_words(section)])
    assert result["aims"]["zte_gain_1_sign"] == {"want": "sign of +17", "got": "+8", "met": True}
    missed = result["aims"]["zte_gain_1_magnitude"]
    assert not missed["met"]
    assert missed["want"] == "11.9 … 22.1"
    assert "GPU A falls behind" in missed["note"]
    assert result["figures"] == {"zte_gain_1_percent": 8.0, "zte_gain_1_paper_percent": 17.0, "zte_eq_ms": 2.0}
    assert len(result["notes"]) == 1


def test_words_of_every_paper_can_be_read() -> None:
    for name in ("cronus", "tetriinfer", "huawei", "thunderserve", "zte"):
        section = told_in_words(Section(name, name, ()))
        assert section.setup
        assert section.differs
