"""Limits of the code's structure: files with one importer, and files on the path of a request."""

import pytest

from tests.structure.measure import structure
from tests.structure.request_path import files_on_path

SINGLE_IMPORTERS = 0.18  # of the files
CHAT, CHAT_GATEWAY, FLIP = 125, 15, 70


def test_few_files_have_a_single_importer() -> None:
    found = structure()
    single = found.single
    assert len(single) <= SINGLE_IMPORTERS * len(found.files), single


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("kind", "most", "most_of_gateway"), [("chat", CHAT, CHAT_GATEWAY), ("flip", FLIP, 0)])
def test_a_request_enters_few_files(kind: str, most: int, most_of_gateway: int) -> None:
    files = {name for process in files_on_path(kind).values() for name in process}
    assert "shared/wire/rpc_server.py" in files  # the trace works
    assert len(files) <= most, sorted(files)
    assert sum(name.startswith("gateway/") for name in files) <= most_of_gateway
