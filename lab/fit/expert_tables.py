"""Measured mixture-of-experts kernels, read for calibration.

Formats: NVIDIA aiconfigurator (`systems/data/*/moe`), LLMServingSim (`profiler/perf`, `moe.csv`).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from lab.fit.rows import ExpertRows
from lab.fit.tables import column, read_csv
from shared.cost.catalogue import Catalogue, precision_of
from shared.cost.library import bundled_geometry
from shared.errors import InvalidRequest

_MS, _US = 1e-3, 1e-6
_MOST_TOKENS = 16384  # of a step


def aiconfigurator_experts(path: Path) -> Iterator[tuple[str, ExpertRows]]:
    """(precision, rows) of `{system}_vllm-{version}_moe_perf.parquet`; latency in ms.

    Of rows with expert parallelism the table does not say how many tokens reached the rank, so that only those without
    are read; of the distributions over experts, the most even one that was measured.
    """
    frame = pd.read_parquet(path)
    plain = (frame["moe_ep_size"] == 1) & (frame["num_tokens"] <= _MOST_TOKENS)
    frame = frame[plain & (frame["kernel_source"] == "vllm_fused_moe")]
    even = min(frame["distribution"].unique())
    for name, part in frame[frame["distribution"] == even].groupby("moe_dtype"):
        tokens, count = column(part, "num_tokens"), column(part, "num_experts")
        picked = column(part, "topk")
        yield (
            str(name),
            ExpertRows(
                seconds=column(part, "latency") * _MS,
                rows=tokens * picked,
                active=count * (1.0 - (1.0 - picked / count) ** tokens),  # see Experts.expected_active
                hidden=column(part, "hidden_size"),
                width=column(part, "inter_size") / column(part, "moe_tp_size"),
                precision=precision_of(str(name)),
            ),
        )


def llmservingsim_experts(path: Path) -> ExpertRows:
    """Rows of `{device}_{model}_tp{n}_moe.csv`: tokens, activated experts, time in µs."""
    geometry = bundled_geometry(path.stem.split("_")[1])
    if geometry.experts is None:
        raise InvalidRequest(f"{path.name}: {geometry.name} has no experts")
    frame = read_csv(path)
    same = np.ones(len(frame))
    return ExpertRows(
        seconds=column(frame, "time_us") * _US,
        rows=column(frame, "tokens") * geometry.experts.per_token,
        active=column(frame, "activated_experts"),
        hidden=same * geometry.hidden,
        width=same * geometry.experts.intermediate,
        precision=precision_of(geometry.dtype),
    )


def accelerator_named(path: Path, catalogue: Catalogue) -> str:
    """The catalogue's name of the device that a table's file name begins with."""
    return catalogue.get(path.name.split("_vllm-")[0] if "_vllm-" in path.name else path.name.split("_")[0]).name
