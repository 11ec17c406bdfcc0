"""KV transfer between instances: export from the prefill side, import on the decode side.

The engine loads the connector (`kv.vllm.connector`: its settings and its requests' parameters); the worker process
sends operations to the connector's ranks and receives their events (`kv.rank_links`), and the prefill and decode
services use both through `kv.port`. A rank's own side is `kv.wire.endpoint`.

A request that exports has its prompt's KV staged while it is computed, from token 0, prefix-cache hits included. The
worker may send the handle before the prefill has begun: pulls wait. An aborted request drops its staging; otherwise it
is kept until all importer ranks have confirmed, `Release` is called, or the lease expires. A transfer id is used once.
"""

from services.worker.kv.errors import lossy_salt

__all__ = ["lossy_salt"]
