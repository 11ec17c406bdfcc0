import importlib
import inspect
import sys

import pytest

from lab.bench.heap_walk.sitecustomize import KEPT, allocators, walked


@pytest.mark.parametrize(("path", "attribute"), [(path, attribute) for path, attribute, _ in KEPT])
def test_what_is_looked_for_is_there(path: str, attribute: str) -> None:
    module, _, name = path.rpartition(".")
    assert f"self.{attribute}" in inspect.getsource(getattr(importlib.import_module(module), name))


def test_each_object_is_counted_once_and_keys_are_too() -> None:
    key, value = "k" * 1_000, ["v" * 1_000]
    seen: set[int] = set()
    size = walked({key: value, "other": value}, seen)
    assert 2_000 < sys.getsizeof(key) + sys.getsizeof(value[0]) < size < 3_000
    assert walked([key, value], seen) < 200


def test_allocators_are_told_of_in_bytes() -> None:
    found = allocators()
    assert found["pss"] > 1 << 20
    assert 0 < found["c_used"] < found["pss"] << 3
