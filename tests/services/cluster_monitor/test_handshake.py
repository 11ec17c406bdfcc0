from typing import Any

import msgspec
import pytest

from services.cluster_monitor.registry import check
from shared.errors import Incompatible
from tests.services.fake_worker import FIT, GEOMETRY, make_info

MEMBER = make_info("old", "tcp://127.0.0.1:1")


def newcomer(**changes: Any) -> Any:
    return make_info("new", "tcp://127.0.0.1:2", compatibility=msgspec.structs.replace(FIT, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fingerprint": "fp-2"}, "fingerprint is 'fp-2', the cluster has 'fp-1'"),
        ({"engine_version": "0.2"}, "engine_version is '0.2', the cluster has '0.1.0'"),
        ({"wire_version": 2}, "wire_version is 2, the cluster has 1"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, layers=7)}, "geometry.layers is 7, the cluster has 6"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, kv_heads=8)}, "geometry.kv_heads is 8"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, head_dim=8)}, "geometry.head_dim is 8"),
        ({"engine": "vllm", "fingerprint": "fp-2"}, "fingerprint is 'fp-2'"),
    ],
)
def test_a_refusal_names_the_field_and_both_values(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Incompatible, match="new does not fit this cluster") as caught:
        check(newcomer(**changes), [MEMBER])
    assert says in caught.value.message
    assert "as old has it" in caught.value.message


def test_wire_versions_that_speak_with_each_other_are_let_in() -> None:
    check(newcomer(wire_version=2, min_wire_version=1), [MEMBER])
    with pytest.raises(Incompatible, match="min_wire_version is 2, the cluster has 0"):
        check(newcomer(wire_version=3, min_wire_version=2), [MEMBER])


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(Incompatible) as caught:
        check(newcomer(fingerprint="fp-2", wire_version=9), [MEMBER])
    assert "fingerprint" in caught.value.message
    assert "wire_version" in caught.value.message


def test_engines_may_mix_where_the_model_agrees() -> None:
    check(newcomer(engine="vllm", engine_version="0.32.0"), [MEMBER])


def test_layout_and_precision_may_differ() -> None:
    other = make_info("new", "tcp://127.0.0.1:2", dtype="float32", block_size=128, tensor_parallel=2, max_model_len=99)
    check(other, [MEMBER])


def test_the_first_may_be_anything_but_what_the_settings_exclude() -> None:
    check(newcomer(fingerprint="other"), [])
    with pytest.raises(Incompatible, match="the settings pin 'fp-1'"):
        check(newcomer(fingerprint="other"), [], fingerprint="fp-1")
