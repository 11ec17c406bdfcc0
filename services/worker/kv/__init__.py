"""KV transfer between instances: export from the prefill side, import on the decode side.

How a worker uses it
--------------------

1. The engine gets the connector through its `KVTransferConfig`::

    KVTransferConfig(
        kv_connector="PolyphaseConnector",
        kv_connector_module_path="services.worker.kv.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            # Required.
            "endpoints": ["kv://10.0.0.3:7100", ...],   # one a rank, stage by stage, as in KvHandle.endpoints; the
                                                        # scheme is the transport: kv (plain TCP), tcp (ZeroMQ),
                                                        # nixl (TCP, and NIXL with those that have it, too)
            "events": "ipc:///run/.../events",          # where KvEvents listens; bind it first
            "control_key": "random text",               # the worker makes it, KvControl presents it
            "instance_id": "p0",
            "generation": 1732100000000000000,          # InstanceInfo.generation
            "fingerprint": "…",                         # Compatibility.fingerprint
            # Optional, with their defaults.
            "staging_bytes": None,                      # bound of one rank's export pool; None: by its KV
            "lease_s": 60.0,                            # staged KV that is neither pulled nor renewed lives this long
            "lease_renewals": 120,                      # of one transfer's lease, by importers that wait for blocks
            "pull_timeout_s": 10.0,                     # an import without progress for so long fails
            "connect_timeout_s": 2.0,                   # an exporter that cannot be reached fails this fast
            "inbox_bytes": 64 << 20,                    # bound of one rank's prefetched KV
            "connections": 1,                           # to each exporter rank, for imports of 8 MB and more
            "controls": [],                             # one a rank, ipc:// or tcp://: where SocketControl connects
            "nixl_trusted": False,                      # NIXL with other hosts: see NixlUse
            "lossy": False,                             # load the codecs at the start, not with the first coded KV
            "curve_public": "", "curve_secret": "",     # CurveZMQ pair of the cluster (Z85)
            "encrypted": True,                          # with a pair, TCP is TLS; False: it proves the pair and no more
            "fault": "",                                # fault injection for tests: "zero" or "corrupt"
        },
    )

2. Each request says what it wants in `SamplingParams(extra_args={"kv_transfer_params": …})`:

   - export: `{"export": {"transfer_id": str, "codec": str}}`. The prompt's KV is staged, chunk by chunk while it is
     computed, from token 0, local prefix-cache hits included: as it is, or on a device coded by `codec` (by default
     raw), which is the handle's then. The worker makes the `KvHandle` itself (`tokens` = prompt length of that
     request, `codec`: how it is coded on the way, `stages`: layers of each of its pipeline stages) and may send it
     before the prefill has begun: pulls wait. An aborted request drops its staging. After a normal end the staging
     lives until every importer rank has confirmed, `release` is called, or the lease ends. A transfer id is used once.
   - import: `{"import": msgspec.to_builtins(handle), "deadline_s": 10.0}` (seconds that it may take in all from
     its blocks on; optional, without it only a lack of progress ends it). The prompt must begin with the handle's
     tokens. A failed import is recomputed by the engine; it is never an error of the request.
   - both keys together are allowed: an instance in the middle.

   With a lossy codec the importing request MUST have `cache_salt=lossy_salt(transfer_id)`: approximate KV lands
   in the importer's prefix cache and would be served to exact requests otherwise. The connector refuses to
   import lossy KV into a request without that salt; it recomputes, with the error "unsalted".

3. Events reach the worker process (`services.worker.kv.rank_links`)::

    async with KvEvents(address) as events:  # binds; the address of "events"
        async for event in events:           # StagedChunk | TransferEnded | StagingFailed | PullEnded | ThreadEnded
            ...

   - `StagedChunk(transfer_id, rank, token_end, last, staged_bytes)`: tokens [0, token_end) can be pulled from
     that rank, whose pool holds `staged_bytes` in all.
   - `StagingFailed(transfer_id, rank, reason)`: no room; pulls of it fail at once and the importer recomputes.
     The engine never waits for room: `ExportLedger` decides before it is given a prompt whether its KV will fit.
   - `TransferEnded(transfer_id, rank, staged_bytes)`: that rank holds nothing of an export any more. One a rank.
   - `PullEnded(transfer_id, rank, ok, error, tokens, wire_bytes, started_s, ended_s, prefetched, transport)`: exactly
     one a rank for each request that had an import. `ok and tokens == 0`: all was cached locally and nothing was
     pulled; the connector has told the exporter that it may release. `ended_s` is when the last of the KV had come,
     which for a prefetch may be long before the engine had blocks for it. `not ok`: the engine recomputes, and `error`
     begins with a code of `errors.KvFault`; for a request that was aborted the code is "cancelled".
   - `ThreadEnded(rank, thread, error)`: a bug ended a thread of that rank; the worker goes down and says why.

4. Control goes to the instance's own ranks (`services.worker.kv.rank_links`): `DirectControl(endpoint)` for a single
   rank in the worker's own process, else over their sockets::

    async with SocketControl(controls, control_key) as control:
        # Drop what is staged or prefetched, on all ranks; idempotent.
        await control.release(transfer_id)
        # Start pulling before the engine has blocks for it; kept for so long, if no import comes.
        await control.prefetch(handle, keep_s=600.0)
        # Forget a prefetch.
        await control.drop(transfer_id)
        # Have the exporter keep what a decode cannot pull yet; again every third of the handle's `lease_s`.
        await control.renew(handle)
        # tuple[RankStats, ...] in rank order.
        await control.stats()

   Every call over a socket has a `timeout_s` and raises `DeadlineExceeded` of `shared.errors`, also for a wrong key.

   A prefetch fetches from token 0 and is best effort: where it fails, the import pulls for itself. An import that
   finds one under way takes what has come and goes on with it.

Aborting a request that waits for KV releases the exporter's staging for it: both legs are one job.
"""

from services.worker.kv.errors import lossy_salt

__all__ = ["lossy_salt"]
