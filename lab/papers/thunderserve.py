"""ThunderServe: the ratio study, KV in 4 bits against 16, and the loss of 4 of 32 GPUs."""

from pathlib import Path

from lab.papers.rows import Section
from lab.papers.testbed import Testbed
from lab.papers.thunderserve_link import kv_rows, link_rows
from lab.papers.thunderserve_loss import loss_rows
from lab.papers.thunderserve_ratio import ratio_rows


def thunderserve_section(testbed: Testbed, data: Path) -> Section:
    """All of it."""
    ratios, chart = ratio_rows(testbed, data)
    rows = (*ratios, *kv_rows(testbed), *link_rows(testbed), *loss_rows(testbed, data))
    return Section("thunderserve", "ThunderServe: heterogeneous GPUs in the cloud", rows, (chart,))
