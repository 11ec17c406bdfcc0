"""A gateway of one call, to be killed: has a prompt prefilled, says so, and waits for its end with the KV staged."""

import asyncio
import sys
import time

from shared.domain.job import Generation, JobView
from shared.domain.prompt import packed
from shared.domain.route import PolicySpec
from shared.wire.messages import PREFILL, PrefillRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets


async def main(address: str, sampling: bytes) -> None:
    prompt = list(range(10, 400))
    request = PrefillRequest(
        JobView("killed", len(prompt), 8),
        "t-killed",
        packed(prompt),
        Generation(sampling, time.time()),
        dispatch=PolicySpec("power_of_two"),
    )
    with RpcClients(Sockets()) as clients:
        await clients.to(address).call(PREFILL, request, timeout_s=60)
        print("staged", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], bytes.fromhex(sys.argv[2])))
