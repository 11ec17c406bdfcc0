"""When a request may leave the engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from services.worker.engines.base import CacheExport, Left
from services.worker.engines.vllm_exports import CacheExports
from services.worker.engines.vllm_patches import FORCED

EXPORT = CacheExport("t", 0, lambda _: None, lambda: True)


class Core:
    """An engine core with one request, which has lost its blocks."""

    def __init__(self, **request: Any) -> None:
        given = {"num_output_tokens": 3, "num_output_placeholders": 0, "num_in_flight_tokens": 0, **request}
        known = given.pop("known", [])
        self.request = SimpleNamespace(
            request_id="r",
            status=RequestStatus.PREEMPTED,
            sampling_params=SamplingParams(extra_args={FORCED: known} if known else None),
            is_finished=lambda: False,
            **given,
        )
        cache = SimpleNamespace(kv_cache_config=SimpleNamespace(has_mamba_layers=False))
        requests = {"r": self.request}
        self.scheduler = SimpleNamespace(kv_cache_manager=cache, requests=requests, running=[])
        self.vllm_config = SimpleNamespace()
        self.answers: list[Left | None] = []
        self.exports = CacheExports(self)

    def leave(self) -> list[Left | None]:
        self.exports.leave("r", EXPORT, self.answers.append)
        self.exports.advance()
        return self.answers


@pytest.mark.parametrize("under_way", ["num_output_placeholders", "num_in_flight_tokens"])
def test_a_request_leaves_when_no_step_has_it(under_way: str) -> None:
    """A token that is on its way has its part in the sampler's state already."""
    core = Core(**{under_way: 1})
    assert core.leave() == []
    setattr(core.request, under_way, 0)
    core.exports.advance()
    assert core.answers == [Left(0, b"")]


@pytest.mark.parametrize(("known", "answer"), [([], Left(0, b"")), ([7, 8, 9], Left(0, b"")), ([7, 8, 9, 5], None)])
def test_a_request_that_repeats_what_its_client_has_stays(known: list[int], answer: Left | None) -> None:
    assert Core(known=known).leave() == [answer]


def test_a_request_without_a_token_stays() -> None:
    assert Core(num_output_tokens=0).leave() == [None]
