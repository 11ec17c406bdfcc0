"""`polyphase bench papers`: what the five papers measured, beside what the same policies and costs give here."""

from pathlib import Path
from typing import Any

from benchmarks.papers.cronus import cronus_section
from benchmarks.papers.huawei import huawei_section
from benchmarks.papers.report import as_result, told_in_words, write_docs
from benchmarks.papers.testbed import COEFFICIENTS, Testbed
from benchmarks.papers.tetriinfer import tetriinfer_section
from benchmarks.papers.thunderserve import thunderserve_section
from benchmarks.papers.zte import zte_section


def run_papers_bench(data_dir: Path, docs: Path | None = None) -> dict[str, Any]:
    """All five, from the folder that holds `traces/`; with `docs`, the page and its charts are written there.

    Returns {"figures": {name_unit: number}, "aims": {name: {"want", "got", "met"}}, "notes": [str]}.
    """
    testbed = Testbed()
    sections = [
        told_in_words(section)
        for section in (
            cronus_section(testbed, data_dir),
            tetriinfer_section(testbed),
            huawei_section(testbed, data_dir),
            thunderserve_section(testbed, data_dir),
            zte_section(testbed),
        )
    ]
    if docs is not None:
        write_docs(docs, sections, COEFFICIENTS.read_text(encoding="utf-8"))
    return as_result(sections)
