"""Where the measured suite is."""

from pathlib import Path

import pytest

from shared.errors import InvalidRequest, NotFound
from tools.calibrate.target import Target, find_target, request_id_of


def test_all_addresses_or_none(tmp_path: Path) -> None:
    found = find_target(tmp_path, "http://h:8000", "http://h:1", ("http://h:2",), "key")
    assert found == Target("http://h:8000", "http://h:1", ("http://h:2",), "", "key")
    assert found.api_address == ("h", 8000)
    with pytest.raises(InvalidRequest, match="--scheduler"):
        find_target(tmp_path, "http://h:8000", "http://h:1", (), "")
    with pytest.raises(NotFound, match="polyphase up"):
        find_target(tmp_path, "", "", (), "")


@pytest.mark.parametrize(
    ("job", "name"), [("cmpl-m12n3-0-ab12cd34", "m12n3"), ("cmpl-m12n3-0", "m12n3"), ("other", "")]
)
def test_the_clients_id_is_in_the_jobs(job: str, name: str) -> None:
    assert request_id_of(job) == name
