"""What counts as queued in a worker's load: prompts that are to be computed, without what the instance holds."""

import asyncio
import time

import msgspec

from shared.domain.instance import Role
from shared.domain.kv import KvHandle
from shared.wire.messages import TokenStep
from tests.services.worker.jobs.sides import Side, decode_request, prefill_request


async def test_prompts_that_a_decode_instance_has_to_compute_count_as_queued_until_their_first_token() -> None:
    side = Side(Role.DECODE)
    handle = KvHandle("t1", "p0", 1, "fp", (), 2, "bfloat16")
    for given, queued, tokens in ((None, 1, 2), (handle, 0, 0)):  # the last token is the first decode's
        task = await side.decode(decode_request(given))
        assert (side._decode.queued, side._decode.queued_tokens) == (queued, tokens)
        side.engine.step(TokenStep([5], ""))
        assert (side._decode.queued, side._decode.queued_tokens) == (0, 0)
        side.engine.step(TokenStep([6], "stop"))
        await task
        side.engine.arrived.clear()


async def test_what_an_instance_is_known_to_hold_of_a_prompt_does_not_count_as_queued() -> None:
    computes, decodes = Side(Role.PREFILL), Side(Role.DECODE)
    task = await computes.prefill(prefill_request(50, saved=32))
    assert (computes._prefill.queued, computes._prefill.queued_tokens) == (1, 18)
    request = msgspec.structs.replace(decode_request(), saved=1)
    other = await decodes.decode(request)
    assert (decodes._decode.queued, decodes._decode.queued_tokens) == (1, 1)
    for side in (computes, decodes):
        side.engine.step(TokenStep([42], "length"))
    await task
    await other


async def test_prompts_count_as_queued_until_they_are_computed_and_the_wait_ends_when_the_engine_takes_them() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request(5))
    assert (side._prefill.queued, side._prefill.queued_tokens) == (1, 5)
    await asyncio.sleep(0.01)
    side.engine.enter()
    entered_s = time.time()
    side.engine.enter()  # preempted, and taken again
    side.engine.step(TokenStep([42], "length"))
    reply = await task
    assert (side._prefill.queued, side._prefill.queued_tokens) == (0, 0)
    assert reply.started_s - reply.queued_s >= 0.009
    assert reply.started_s <= entered_s


async def test_jobs_that_share_a_prefix_hold_its_blocks_once() -> None:
    """Two prompts of three tokens whose blocks hold four tokens together: each counts for two."""
    side = Side(Role.DECODE)
    assert side._decode.kv_ahead(0, 0) == ()
    tasks = []
    for _ in range(2):
        tasks.append(await side.decode(msgspec.structs.replace(decode_request(), saved=2)))
        side.engine.arrived.clear()
    assert (side._decode.context_tokens, side._decode.queued_tokens) == (6, 0)
    assert side._decode.kv_ahead(6, 0)[0] == 2 * (3 + 8)
    assert side._decode.kv_ahead(4, 0)[0] == 2 * (2 + 8)
    assert side._decode.kv_ahead(0, 0)[0] == 2 * (3 + 8), "nothing is known of blocks"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
