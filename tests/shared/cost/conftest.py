import os
from pathlib import Path

import pytest

from shared.cost.library import Library


@pytest.fixture(scope="session")
def library() -> Library:
    return Library.built_in()


@pytest.fixture(scope="session")
def profiles() -> Path:
    """Public profiles: POLYPHASE_DATA, or `shared/data` beside the repository. The product does not contain them."""
    named = os.environ.get("POLYPHASE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[4] / "shared" / "data"
    if not (folder / "profiles").is_dir():
        pytest.skip(
            f"no public profiles at {folder / 'profiles'}: set POLYPHASE_DATA to a folder that holds `profiles/`"
        )
    return folder / "profiles"
