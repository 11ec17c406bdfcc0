"""The model card of a checkpoint: what it was made of and how good it is, for people."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predictor.checkpoint import CheckpointMeta
from predictor.evaluate import Evaluation
from predictor.scores import Scores

FILE = "README.md"


def write_card(folder: Path, meta: CheckpointMeta, settings: Mapping[str, Any], found: Evaluation) -> None:
    """`README.md`, as the hubs of models show it."""
    (folder / FILE).write_text(_card(meta, settings, found), encoding="utf-8")


def _card(meta: CheckpointMeta, settings: Mapping[str, Any], found: Evaluation) -> str:
    last = (meta.bucket_count - 1) * meta.bucket_tokens
    rows = [("this classifier", found.scores), ("commonest bucket", found.majority)]
    rows.append(("the prompt's length alone", found.prompt_length))
    table = "\n".join(_row(name, one) for name, one in rows)
    noise = "was not measured (one answer a prompt)"
    if found.ceiling is not None:
        noise = (
            f"lies between {found.ceiling.lower:.1%} and {found.ceiling.upper:.1%} ({found.ceiling.prompts} prompts)"
        )
    findings = "".join(f"**{one.text}**\n\n" for one in found.findings())
    silent = {"base" if settings.get("from_scratch") else "from_scratch"}
    lines = "\n".join(f"- {key}: {value}" for key, value in settings.items() if value is not None and key not in silent)
    return f"""---
library_name: transformers
pipeline_tag: text-classification
---

# Output lengths of {Path(meta.served_model).name}

How many tokens the model will answer a prompt with, in buckets of {meta.bucket_tokens} tokens; the last is {last}
and more. Made by `polyphase predictor train` (TetriInfer, arXiv 2401.11181, section 3.3.2); base: {meta.base}.

| on {found.scores.examples} held-out answers | right | within one bucket | mean error, tokens | calibration error |
|---|---|---|---|---|
{table}

The noise ceiling, the most that can be right of answers that differ each time, {noise}.

{findings}Data: {", ".join(f"{count} for {name}" for name, count in meta.examples.items())}; SHA-256 {meta.data_digest}.

Settings:

{lines}
"""


def _row(name: str, scores: Scores) -> str:
    shares = f"{scores.accuracy:.1%} | {scores.within_one:.1%}"
    return f"| {name} | {shares} | {scores.mean_error_tokens:.0f} | {scores.calibration_error:.3f} |"
