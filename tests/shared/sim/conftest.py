import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def traces() -> Path:
    """Public traces: POLYPHASE_DATA, or `shared/data` beside the repository. The product does not contain them."""
    named = os.environ.get("POLYPHASE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[4] / "shared" / "data"
    if not (folder / "traces").is_dir():
        pytest.skip(f"no public traces at {folder / 'traces'}: set POLYPHASE_DATA to a folder that holds `traces/`")
    return folder / "traces"
