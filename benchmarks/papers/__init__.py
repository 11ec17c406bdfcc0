"""`polyphase bench papers`: what the five papers measured, beside what the same policies and costs give here."""

from pathlib import Path

from benchmarks.papers.cronus import cronus_section
from benchmarks.papers.huawei import huawei_section
from benchmarks.papers.report import as_result, page_text
from benchmarks.papers.testbed import COEFFICIENTS, Testbed
from benchmarks.papers.tetriinfer import tetriinfer_section
from benchmarks.papers.thunderserve import thunderserve_section
from benchmarks.papers.zte import zte_section
from benchmarks.results import Result


def run_papers_bench(data: Path, docs: Path | None = None) -> Result:
    """All five. data: the folder that holds `traces/`. docs: the folder to write `papers.md` into."""
    testbed = Testbed()
    sections = [
        cronus_section(testbed, data),
        tetriinfer_section(testbed),
        huawei_section(testbed, data),
        thunderserve_section(testbed, data),
        zte_section(testbed),
    ]
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        page = page_text(sections, COEFFICIENTS.read_text(encoding="utf-8"))
        (docs / "papers.md").write_text(page, encoding="utf-8")
    return as_result(sections)
