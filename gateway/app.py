"""Assembles the gateway process: vLLM's API server, the pipeline behind it, the limits around both, its sockets, and
its readiness. The settings decide what is assembled; `gateway.__main__` runs it.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
import uvloop
import vllm.envs
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import AsyncEngineArgs
from vllm.config import LoRAConfig, ModelConfig, ReasoningConfig, VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gateway import media, vllm_options, vllm_patches
from gateway.adapters import PATHS as ADAPTER_PATHS
from gateway.adapters import ServedAdapters
from gateway.adapters import routes as adapter_routes
from gateway.admission import Admissions, PlacementQueue
from gateway.auth import LOOPBACK, REREAD_S, KeyRates, KeyRing
from gateway.connection import WRITE_TIMEOUT_S, stream_protocol
from gateway.core import ClusterCore, ClusterLLM, JobRunner
from gateway.edge import Edge
from gateway.fast_path import FastPath, health_of, serve_plain_streams
from gateway.lengths import LengthClient
from gateway.metrics import GatewayMetrics
from gateway.pipeline import Pipeline
from gateway.plain_stream import Pace
from gateway.reports import Reporter, recording
from gateway.sessions import WARM_PATH, SessionBook, Warmer
from gateway.sessions import routes as session_routes
from gateway.settings import GatewaySettings
from gateway.structured_outputs import Grammars
from gateway.table import ServedTokens, shared_table
from gateway.tracing import TracedRequests
from shared.domain.job import WhenFull
from shared.errors import Conflict, InvalidRequest
from shared.model.source import read_config
from shared.runtime.connections import ConnectionLimits, Connections, bounded
from shared.runtime.http import READY, exposing, say_state
from shared.runtime.logs import get_log, keeping_levels
from shared.runtime.metrics import describe_process
from shared.runtime.server import Server, settle
from shared.runtime.tasks import background
from shared.runtime.tracing import tracing
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.rpc_client import SWEEP_S, RpcClients
from shared.wire.sockets import Sockets, open_sockets

log = get_log(__name__)
BACKLOG = 2048  # uvicorn's
VLLM_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"  # it makes vLLM export traces that are not connected to ours
_TASKS = ("generate",)
_CLOSE_S = 1  # for connections to close once `drain_s` is over


Beside = AbstractAsyncContextManager[Sockets]


def run(settings: GatewaySettings, runner: JobRunner | None = None, beside: Beside | None = None) -> None:
    """Run the gateway on its own event loop. beside: see `running`."""
    prepare_environment()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(serve(settings, runner, beside))


def prepare_environment() -> None:
    """Before vLLM starts: no weights are loaded here, so no accelerator memory is needed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "0")
    os.environ.pop(VLLM_TRACES, None)


async def serve(settings: GatewaySettings, runner: JobRunner | None = None, beside: Beside | None = None) -> None:
    """Serve until SIGTERM or SIGINT; `runner` replaces the pipeline. Raises InvalidRequest for bad settings."""
    keys = KeyRing.of_file(settings.api_keys_file)
    keys.require_classes(settings.slo)
    if keys.open and settings.host not in LOOPBACK:
        raise InvalidRequest(f"listening on {settings.host} needs API keys (api_keys_file); without, only loopback")
    async with running(settings, keys, runner, beside) as app:
        if settings.lean_streams:
            vllm.envs.enable_envs_cache()  # vLLM reads the environment some thirty times for a request
        limits = ConnectionLimits(
            head_s=settings.head_timeout_s,
            idle_s=settings.idle_timeout_s,
            most=settings.max_connections,
            most_an_address=settings.max_connections_an_address,
            proxies=frozenset(settings.proxy_addresses),
        )
        connections = Connections(limits)
        server = http_server(app, settings.host, settings.port, connections, settings.write_timeout_s)
        server.on_started, server.holds_signals = settle, True
        vllm_app: Any = app.app
        vllm_app.state.server = server  # vLLM's handler of a dead engine ends it

        async def drain() -> None:
            if settings.processes > 1:  # the kernel gives new connections to the other processes
                server.servers[0].close()
            await connections.drain(settings.drain_s)

        server.drain = drain
        await server.serve(_sockets(settings))
    server.raise_signals()


def http_server(
    app: ASGIApp, host: str, port: int, connections: Connections | None = None, write_timeout_s: float = WRITE_TIMEOUT_S
) -> Server:
    if connections is None:
        connections = Connections(ConnectionLimits())
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        http=bounded(stream_protocol(write_timeout_s), connections),
        ws="none",
        timeout_graceful_shutdown=_CLOSE_S,
    )
    return Server(config)


@asynccontextmanager
async def running(
    settings: GatewaySettings, keys: KeyRing, runner: JobRunner | None = None, beside: Beside | None = None
) -> AsyncIterator[Edge]:
    """The whole application with its clients and tasks started; they are stopped in reverse at the end of the block.

    beside: other services of the process, with which it shares the sockets. They run from before the first call of the
    gateway until after its last.
    """
    async with AsyncExitStack() as stack:
        table = stack.enter_context(shared_table(settings))
        source = read_config(settings.source, trust_remote_code=settings.trust_remote_code)
        args = _arguments(settings)
        media.prepare_environment(settings)
        model_config, served_media = media.model_config(args, source)
        config = _config(args, settings, model_config)
        if served_media.served:
            vllm_patches.send_all_media(config)
            vllm_patches.resample_without_torchaudio()
        grammars = stack.enter_context(Grammars(config, settings))  # it forks: before any connection

        sockets = await stack.enter_async_context(beside or open_sockets(settings))
        keep = (*settings.schedulers, *settings.predictors, *settings.predictors_beside.values())
        clients = stack.enter_context(RpcClients(sockets, keep=keep))
        schedulers = SchedulerClient(clients, settings.schedulers, settings.gateway_id)

        registry = CollectorRegistry()
        describe_process(registry)
        metrics = GatewayMetrics(settings.served_model_name or settings.model, registry, settings.max_model_len)
        metrics.begin_classes(settings.slo)
        tasks = await stack.enter_async_context(background())
        recorder = await stack.enter_async_context(recording(settings, metrics, tasks))
        reporter = Reporter(schedulers, metrics, recorder)
        tasks.start("reports", reporter.run())
        tasks.start("grammars", grammars.watch())
        tasks.every("api keys", REREAD_S, keys.reread)
        tasks.every("rpc clients", SWEEP_S, clients.sweep)

        lengths = LengthClient(clients, settings, metrics.predictions)
        stack.push_async_callback(lengths.close)
        queue = PlacementQueue(keys.weights, ServedTokens(table) if table.processes > 1 else None)
        for name, slo in settings.slo.items():
            if slo.when_full is WhenFull.DELAY:
                metrics.waiting.labels(slo=name).set_function(partial(queue.waiting, name))
        jobs = runner or Pipeline(settings, clients, schedulers, reporter, lengths, queue)
        core = ClusterCore(settings, jobs, Pace(), metrics.requests.gaps)
        stack.push_async_callback(core.close)
        llm = ClusterLLM(config, core, grammars, served_media)
        stack.callback(llm.shutdown)

        tracer = await stack.enter_async_context(tracing(settings.tracing, "gateway", settings.gateway_id, registry))
        vllm_patches.share_threads(llm.renderer, args.renderer_num_workers, keys.weights)
        app, served = await _vllm_app(args, llm)
        adapters = None
        if settings.lora.allow_runtime_updating:
            models = app.state.openai_serving_models
            adapters = ServedAdapters(settings, schedulers, models, lambda: core.loaded_adapters)
            core.adapter_key, served = adapters.key_of, served | ADAPTER_PATHS
            app.include_router(adapter_routes(adapters))
            tasks.start("adapters", adapters.follow())
        if settings.sessions:
            book = SessionBook(settings.sessions, settings.session_bytes)
            warmer = Warmer(settings, book, clients, schedulers, metrics.warms)
            stack.push_async_callback(warmer.close)
            app.include_router(session_routes(warmer))
            core.on_turn, served = book.ended, served | {WARM_PATH}
            metrics.sessions.set_function(lambda: len(book))
            metrics.session_bytes.set_function(lambda: book.bytes)
        if settings.lean_streams:
            serve_plain_streams(app.state, direct=vllm_patches.bodies_pass(app))

        admissions = Admissions(settings, keys.weights, table)
        metrics.queued.set_function(lambda: admissions.own_jobs)
        edge = Edge(app, settings, keys, metrics, admissions, KeyRates(table))
        edge.served, edge.root_path, edge.rejection = served, args.root_path or "", vllm_patches.rejection
        edge.open[READY] = ready_of(schedulers, adapters)
        edge.open["/metrics"] = exposing(registry, app)
        if settings.lean_streams:
            edge.fast_path = FastPath(app).app_for
            edge.open["/health"] = health_of(llm)
        if tracer is not None:
            edge.traced = TracedRequests(tracer, settings.served_model_name or settings.model, served)
        edge.on_refused = core.on_refused = reporter.refused
        if adapters is not None:
            edge.operators_only = ADAPTER_PATHS
            await adapters.wait()
        yield edge
        await core.close()  # before the last reports, which include the jobs that it cancels
        await reporter.leave()


def ready_of(schedulers: SchedulerClient, adapters: ServedAdapters | None) -> ASGIApp:
    """Answers `/ready`: a gateway without a scheduler can only let clients wait, and one that does not know the loaded
    adapters would refuse requests for them.
    """

    async def ready(_: Scope, __: Receive, send: Send) -> None:
        unknown = adapters.unknown if adapters is not None else ""
        await say_state(send, "gateway", unknown if schedulers.connected else "no scheduler is there")

    return ready


def _arguments(settings: GatewaySettings) -> Any:
    """The arguments of vLLM's API server."""
    options: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": settings.served_model_name or settings.model,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "renderer_num_workers": vllm_patches.SLOTS,
        "disable_uvicorn_access_log": True,
        "disable_log_stats": True,
        "mm_processor_cache_gb": media.CACHE_GB,
        **media.with_limits({vllm_options.normal(name): value for name, value in settings.vllm_args.items()}),
    }
    if settings.lora.adapters:
        options["lora_modules"] = [{"name": name, "path": folder} for name, folder in settings.lora.adapters.items()]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm_options.words_of(options))
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    validate_parsed_serve_args(args)
    return args


def _config(args: Any, settings: GatewaySettings, model: ModelConfig) -> VllmConfig:
    """What vLLM's front end reads of an engine's configuration. Its handlers find the reasoning parser in `args`, where
    an engine's start would put it, or the default of the model.
    """
    engine = AsyncEngineArgs.from_cli_args(args)
    reasoning = engine.reasoning_config
    if engine.reasoning_parser:
        reasoning = reasoning or ReasoningConfig()
        reasoning.reasoning_parser = engine.reasoning_parser
    args.structured_outputs_config = engine.create_structured_outputs_config()
    return VllmConfig(
        model_config=model,
        lora_config=LoRAConfig() if settings.lora.enabled else None,  # its values matter to engines alone
        structured_outputs_config=args.structured_outputs_config,
        reasoning_config=reasoning,
    )


async def _vllm_app(args: Any, llm: ClusterLLM) -> tuple[FastAPI, frozenset[str]]:
    """vLLM's API server without an engine in the process, and the paths that it serves."""
    vllm_patches.stop_at_first_errors()
    if (tokenizer := llm.renderer.tokenizer) is not None:
        vllm_patches.bound_tokenize_texts(tokenizer.max_chars_per_token)
    with keeping_levels():
        app: FastAPI = build_app(args, _TASKS, llm.model_config)
    served = vllm_patches.trim(app)
    vllm_patches.use_parsed_bodies()
    await init_app_state(llm, app.state, args, _TASKS)
    vllm_patches.wrap_handlers(app.state)
    vllm_patches.name_stream_errors(app.state.anthropic_serving_messages)
    vllm_patches.score_in_threads(app.state.serving_generative_scoring, llm.renderer)
    return app, served


def _sockets(settings: GatewaySettings) -> list[socket.socket] | None:
    """The sockets of a process that shares its port; None where the server opens its only one. Raises Conflict.

    The kernel gives each new connection to one of the processes that listen on the port, all of one user. Each process
    also listens on a port of its own.
    """
    if settings.processes == 1:
        return None
    shared = _listening(settings.host, settings.port, share=True)
    try:
        return [shared, _listening(settings.host, settings.own_port)]
    except BaseException:
        shared.close()
        raise


def _listening(host: str, port: int, *, share: bool = False) -> socket.socket:
    listening = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise Conflict(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listening
