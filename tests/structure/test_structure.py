"""Limits of the code's structure: files with one importer, and files on the path of a request."""

import pytest

from tests.structure.measure import structure
from tests.structure.request_path import files_on_paths

SINGLE_IMPORTERS = 0.18  # of the files
CHAT, CHAT_GATEWAY, FLIP = 125, 16, 70


def test_few_files_have_a_single_importer() -> None:
    found = structure()
    single = found.single
    assert len(single) <= SINGLE_IMPORTERS * len(found.files), single


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_chat_stream_and_a_flip_enter_few_files() -> None:
    paths = files_on_paths("chat", "flip")
    for kind, limit in (("chat", CHAT), ("flip", FLIP)):
        files = {name for process in paths[kind].values() for name in process}
        assert "shared/wire/rpc_server.py" in files  # the trace works
        assert len(files) <= limit, sorted(files)
        if kind == "chat":
            assert sum(name.startswith("gateway/") for name in files) <= CHAT_GATEWAY
