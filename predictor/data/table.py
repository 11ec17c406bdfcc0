"""A dataset as a Parquet file: prompts, lengths and splits, with the settings that it was made under."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from predictor.data.examples import split_of
from predictor.data.journal import Line

FILE = "dataset.parquet"
_KEY = b"polyphase"


def write_table(folder: Path, lines: Sequence[Line], settings: dict[str, Any]) -> Path:
    """Rows in the order of their prompts' hashes: prompt, sample, prompt_tokens, output_tokens, cut, split."""
    import pyarrow
    import pyarrow.parquet

    columns = {
        "prompt": pyarrow.array([line.prompt for line in lines], pyarrow.string()),
        "sample": pyarrow.array([line.sample for line in lines], pyarrow.int32()),
        "prompt_tokens": pyarrow.array([line.prompt_tokens for line in lines], pyarrow.int32()),
        "output_tokens": pyarrow.array([line.output_tokens for line in lines], pyarrow.int32()),
        "cut": pyarrow.array([line.cut for line in lines], pyarrow.bool_()),
        "split": pyarrow.array([split_of(line.prompt) for line in lines], pyarrow.string()),
    }
    table = pyarrow.table(columns).replace_schema_metadata({_KEY: json.dumps(settings).encode()})
    path, fresh = folder / FILE, folder / f".{FILE}.new"
    pyarrow.parquet.write_table(table, fresh)
    fresh.replace(path)
    return path


def settings_of(path: Path) -> dict[str, Any]:
    """What a file of `write_table` was made under; nothing for another file."""
    import pyarrow.parquet

    told = (pyarrow.parquet.read_schema(path).metadata or {}).get(_KEY)
    found: dict[str, Any] = json.loads(told) if told else {}
    return found
