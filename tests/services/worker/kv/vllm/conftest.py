import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of the same engines one after the other: starting a cluster takes longer than its tests."""
    places = [at for at, item in enumerate(items) if item.path.name == "test_hand_overs.py"]
    grouped = sorted((items[at] for at in places), key=_cluster)
    for at, item in zip(places, grouped, strict=True):
        items[at] = item


def _cluster(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("cluster", "")) if callspec is not None else ""
