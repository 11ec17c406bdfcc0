"""The prefill side: dispatch, and news that arrives while a prompt is computed."""

import asyncio

import msgspec
import pytest

from services.worker.jobs.prefill import REST_S, Dispatcher
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.domain.job import LengthPrediction, Slo
from shared.domain.kv import Codec
from shared.domain.rates import LinkRate, Rates
from shared.domain.route import InstanceRef, PolicySpec
from shared.errors import InvalidRequest, Unavailable
from shared.wire.messages import Predicted, PrefillStarted
from tests.services.fake_worker import make_info
from tests.services.worker.jobs.sides import FIRST_TOKEN, TARGET, Side, decode_request, prefill_request
from tests.shared.policy.views import decode, job


def dispatcher(seed: int | str = 0, instances: int = 8) -> Dispatcher:
    made = Dispatcher(seed)
    assert made.hear(ClusterDelta.from_view(ClusterView(1, 0.0, tuple(decode(f"d{at}") for at in range(instances)))))
    return made


def choices(made: Dispatcher, policy: PolicySpec, count: int = 40) -> list[str]:
    return [made.choose(job(100, 10), policy)[0].instance_id for _ in range(count)]


def test_each_job_is_dispatched_by_the_policy_that_it_brings() -> None:
    made = dispatcher()
    for name in ("random", "power_of_two", "random"):
        _, reasons = made.choose(job(100, 10), PolicySpec(name))
        assert name in reasons[0].what


def test_a_policy_is_built_once_for_each_set_of_parameters() -> None:
    made = dispatcher()
    for policy in (PolicySpec("spread"), PolicySpec("power_of_two", {"unpredicted_tokens": 5}), PolicySpec("spread")):
        choices(made, policy, 3)
    assert len(made._policies) == 2
    for tokens in range(100):
        made.choose(job(100, 10), PolicySpec("power_of_two", {"unpredicted_tokens": tokens}))
    assert len(made._policies) <= 16


def test_a_job_is_dispatched_to_instances_that_serve_its_adapter() -> None:
    made = Dispatcher(0)
    views = decode("d0"), decode("d1", adapters={"a": "1"}), decode("d2", adapters={"b": "1"})
    assert made.hear(ClusterDelta.from_view(ClusterView(1, 0.0, views)))
    for policy in (PolicySpec("random"), PolicySpec("power_of_two"), PolicySpec("spread")):
        assert {made.choose(job(100, 10, adapter="a"), policy)[0].instance_id for _ in range(20)} == {"d1"}
    assert len(set(choices(made, PolicySpec("random")))) == 3
    with pytest.raises(Unavailable, match="no ready decode instance serves the adapter 'c'"):
        made.choose(job(100, 10, adapter="c"), PolicySpec("random"))


def test_a_job_that_forbids_mixed_precision_is_dispatched_within_one() -> None:
    made = Dispatcher(0)
    views = decode("d0"), decode("d8", precision="fp8")
    assert made.hear(ClusterDelta.from_view(ClusterView(1, 0.0, views)))
    for precision, expected in ((None, "d0"), ("", "d0"), ("fp8", "d8")):
        one = job(100, 10, one_precision=True, precision=precision)
        assert {made.choose(one, PolicySpec("random"))[0].instance_id for _ in range(20)} == {expected}


@pytest.mark.parametrize("policy", [None, PolicySpec("no such"), PolicySpec("random", {"more": 1})])
def test_a_policy_that_is_missing_or_unknown_is_named(policy: PolicySpec | None) -> None:
    with pytest.raises(InvalidRequest, match="dispatch policy"):
        dispatcher().choose(job(100, 10), policy)


def test_no_instance_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        dispatcher(instances=0).choose(job(100, 10), PolicySpec("random"))


def test_seeds_of_two_instances_draw_differently_and_one_seed_draws_the_same() -> None:
    policy = PolicySpec("random")
    assert choices(dispatcher("p0:1"), policy) == choices(dispatcher("p0:1"), policy)
    assert choices(dispatcher("p0:1"), policy) != choices(dispatcher("p1:1"), policy)


async def test_the_cluster_is_followed_while_jobs_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, wanted, now = Dispatcher(0), list[bool](), [100.0]
    made.on_follow = wanted.append
    monkeypatch.setattr("services.worker.jobs.prefill.time.monotonic", lambda: now[0])
    assert made.known("d0") is None
    made.rest()
    assert not wanted
    made.expect()
    made.expect()
    assert wanted == [True]
    waiting = asyncio.ensure_future(made.wait_for_cluster())
    await asyncio.sleep(0)
    assert not made.hear(ClusterDelta(5, 0.0))  # a change of what nobody knows
    assert not waiting.done()
    assert made.hear(ClusterDelta.from_view(ClusterView(5, 0.0, (decode("d0"),))))
    await asyncio.wait_for(waiting, 10)
    assert made.choose(job(100, 10), PolicySpec("random"))[0].instance_id == "d0"
    now[0] += REST_S - 1.0
    made.rest()
    made.expect()
    now[0] += REST_S - 1.0
    made.rest()
    assert wanted == [True]
    now[0] += REST_S + 1.0
    made.rest()
    assert wanted == [True, False]
    assert made.known("d0") is None  # what it knew is old
    made.expect()
    assert wanted == [True, False, True]


async def test_a_prediction_that_comes_while_the_prompt_is_computed_is_for_its_dispatch() -> None:
    side, said = Side(Role.PREFILL), LengthPrediction(1, 200, 400, 0.8, "classifier")
    task = await side.prefill(prefill_request())
    await side.predicted(Predicted("t1", said))
    await side.predicted(Predicted("another", LengthPrediction(9, 1800, 2000, 0.8, "classifier")))
    side.engine.step(FIRST_TOKEN)
    await task
    assert [job.prediction for job in side.dispatcher.jobs] == [said]
    await side.predicted(Predicted("t1", said))  # the prompt is computed: no fault


async def test_a_prediction_that_comes_while_it_waits_or_decodes_is_for_the_engines_admission() -> None:
    side, said = Side(Role.DECODE), LengthPrediction(1, 200, 400, 0.8, "classifier")
    task = await side.decode(decode_request())
    await side.predicted(Predicted("", said, "another"))
    assert not side.engine.predictions
    await side.predicted(Predicted("", said, "job"))
    assert side.engine.predictions == {side.engine.requests[0].request_id: said}
    side.engine.step(FIRST_TOKEN)
    await task
    await side.predicted(Predicted("", said, "job"))  # it is over: no fault


def far(bytes_s: float) -> InstanceView:
    info = make_info(TARGET.instance_id, TARGET.rpc, rates=Rates(link=LinkRate(bytes_s)))
    return InstanceView(info, Role.DECODE, InstanceState.READY)


async def test_the_codec_goes_by_the_link_and_the_class_and_stays_what_it_was_first() -> None:
    side = Side(Role.PREFILL, chunk_size=4)
    side.dispatcher.views["d0"] = far(1.0)
    request = prefill_request(10)
    request.job = msgspec.structs.replace(request.job, slo=Slo(lossy_kv=Codec.INT8))
    task = await side.prefill(request)
    side.port.callbacks["t1"]()
    side.dispatcher.views["d0"] = far(1e12)
    side.engine.step(FIRST_TOKEN)
    reply = await task
    assert isinstance(started := side.call.items[0], PrefillStarted)
    assert reply.handle is not None
    assert started.handle.codec is reply.handle.codec is Codec.INT8
    assert reply.codec is not None
    assert reply.codec.what == "codec:int8"


INT8, NONE = Slo(lossy_kv=Codec.INT8), Slo()


@pytest.mark.parametrize(
    ("slo", "codec", "far_away", "lossy", "want"),
    [
        (NONE, Codec.RAW, True, True, Codec.RAW),
        (NONE, Codec.FP8, True, True, Codec.FP8),  # the gateway's setting, for all
        (Slo(lossy_kv=Codec.INT4), Codec.FP8, True, True, Codec.FP8),
        (INT8, Codec.RAW, False, True, Codec.RAW),  # nothing is known of the link
        (INT8, Codec.RAW, True, True, Codec.INT8),
        (INT8, Codec.RAW, True, False, Codec.RAW),  # the codecs were not loaded
        (INT8, Codec.FP8, True, False, Codec.RAW),
    ],
)
@pytest.mark.parametrize("decode", [TARGET, None])
async def test_exact_unless_a_class_or_the_gateway_allows_a_codec_that_is_loaded(
    slo: Slo, codec: Codec, far_away: bool, lossy: bool, want: Codec, decode: InstanceRef | None
) -> None:
    side = Side(Role.PREFILL, lossy=lossy)
    if far_away:
        side.dispatcher.views["d0"] = far(1.0)
    request = prefill_request(codec=codec)
    request.decode, request.job = decode, msgspec.structs.replace(request.job, slo=slo)
    reply = await side.prefilled(request)
    assert reply.handle is not None
    assert reply.handle.codec is want
    # Without a decode instance the class's codec is not known when the prompt goes to the engine.
    early = decode is not None or not slo.lossy_kv.lossy or want is codec
    assert side.engine.requests[0].export_codec is (want if early else Codec.RAW)
    assert (reply.codec is not None) == (far_away and lossy and slo.lossy_kv.lossy and not codec.lossy)
