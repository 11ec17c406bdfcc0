"""Assembles the API process: vLLM's server in front, our pipeline behind it, the limits around it."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
import uvloop
import vllm.envs
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gateway import vllm_options, vllm_patches
from gateway.admission import Admissions, TableLedger
from gateway.auth import LOOPBACK, REREAD_S, KeyRing, OwnRates, TableRates
from gateway.connection import WRITE_TIMEOUT_S, giving_up_after
from gateway.core import ClusterCore, ClusterLLM, JobRunner
from gateway.edge import App, Edge, Receive, Scope, Send
from gateway.fast_path import ShortWay, health_of, serve_plain_streams
from gateway.lengths import LengthClient
from gateway.metrics import GatewayMetrics
from gateway.pipeline import Lines, Pipeline
from gateway.plain_stream import Pace
from gateway.reports import Reporter, recording
from gateway.settings import GatewaySettings
from gateway.structured_outputs import Grammars
from gateway.table import shared_table
from gateway.tracing import TracedRequests
from gateway.vllm_patches import SLOTS, bound_tokenize_texts, share_threads, stop_at_first_errors
from shared.domain.job import WhenFull
from shared.errors import Conflict, InvalidRequest
from shared.runtime.connections import ConnectionLimits, Connections, bounded
from shared.runtime.http import READY, exposing, say_state
from shared.runtime.logs import get_log, keeping_levels
from shared.runtime.metrics import describe_process
from shared.runtime.server import Server, settle
from shared.runtime.tasks import background
from shared.runtime.tracing import tracing
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.rpc_client import SWEEP_S, RpcClients
from shared.wire.sockets import Sockets

# MERGED listening.py
# Where a gateway process listens: on a port alone, or on one that it shares and on one of its own beside it.


BACKLOG = 2048  # uvicorn's


def sockets_of(settings: GatewaySettings) -> list[socket.socket] | None:
    """Those of a process that shares its port; None where the server opens its only one. Raises Conflict.

    The kernel gives each new connection to one of the processes that listen on the port, all of one user.
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
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise Conflict(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise Conflict(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listening


# MERGED readiness.py
# Whether clients are to be sent here: a gateway that hears of no scheduler can only have them wait.


def ready_of(schedulers: SchedulerClient) -> App:
    """What answers `/ready`, as every service's does."""

    async def ready(_: Scope, __: Receive, send: Send) -> None:
        await say_state(send, "gateway", "" if schedulers.connected else "no scheduler is there")

    return ready


log = get_log(__name__)
_TASKS = ("generate",)
_CUT_OFF_S = 1  # for the connections to close once `drain_s` is over
OWN_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"  # has vLLM make traces of its own, which ours know nothing of


async def serve(settings: GatewaySettings, runner: JobRunner | None = None) -> None:
    """Serve until SIGTERM or SIGINT; `runner` takes the pipeline's place. Raises InvalidRequest for bad settings."""
    keys = KeyRing.of_file(settings.api_keys_file)
    keys.require_classes(settings.slo)
    if keys.open and settings.host not in LOOPBACK:
        raise InvalidRequest(f"listening on {settings.host} needs API keys (api_keys_file); without, only loopback")
    async with running(settings, keys, runner) as app:
        if settings.lean_streams:
            vllm.envs.enable_envs_cache()  # it asks for the environment's some thirty times a request
        connections = Connections(_connection_limits(settings))
        server = http_server(app, settings.host, settings.port, connections, settings.write_timeout_s)
        server.on_started, server.holds_signals = settle, True
        vllm_app: Any = app.app
        vllm_app.state.server = server  # vLLM's handler of a dead engine ends it

        async def drain() -> None:
            if settings.processes > 1:  # the kernel gives new connections to the processes that stay
                server.servers[0].close()
            await connections.drain(settings.drain_s)

        server.drain = drain
        await server.serve(sockets_of(settings))
    server.raise_signals()


def _connection_limits(settings: GatewaySettings) -> ConnectionLimits:
    return ConnectionLimits(
        head_s=settings.head_timeout_s,
        idle_s=settings.idle_timeout_s,
        most=settings.max_connections,
        most_an_address=settings.max_connections_an_address,
        proxies=frozenset(settings.proxy_addresses),
    )


def http_server(
    app: Edge, host: str, port: int, connections: Connections | None = None, write_timeout_s: float = WRITE_TIMEOUT_S
) -> Server:
    """The HTTP server in front of everything."""
    if connections is None:
        connections = Connections(ConnectionLimits())
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        http=bounded(giving_up_after(write_timeout_s), connections),
        ws="none",
        timeout_graceful_shutdown=_CUT_OFF_S,
    )
    return Server(config)


@asynccontextmanager
async def running(settings: GatewaySettings, keys: KeyRing, runner: JobRunner | None = None) -> AsyncIterator[Edge]:
    """The whole application with everything behind it started; stopped in reverse at the end of the block."""
    async with AsyncExitStack() as stack:
        table = stack.enter_context(shared_table(settings))
        args = _arguments(settings)
        config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
        grammars = stack.enter_context(Grammars(config, settings))
        clients = _clients(stack, settings)
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
        lines = Lines(keys.weights, TableLedger(table) if table is not None else None)
        _tell_of_waiting(settings, metrics, lines)
        pace = Pace()
        jobs = runner or Pipeline(settings, clients, schedulers, reporter, lengths, lines)
        core = ClusterCore(settings, jobs, pace, metrics.requests.gaps)
        stack.push_async_callback(core.close)
        admission = Admissions(settings, keys.weights, table)  # follows the keys file
        metrics.queued.set_function(lambda: admission.own_jobs)
        rates = OwnRates() if table is None else TableRates(table)
        llm = ClusterLLM(config, core, grammars)
        stack.callback(llm.shutdown)
        tracer = await stack.enter_async_context(tracing(settings.tracing, "gateway", settings.gateway_id, registry))
        share_threads(llm.renderer, args.renderer_num_workers, keys.weights)
        app, served = await _vllm_app(args, llm)
        if settings.lean_streams:
            serve_plain_streams(app.state, direct=vllm_patches.bodies_pass(app))
        edge = Edge(app, settings, keys, metrics, admission, rates)
        edge.served, edge.root_path, edge.rejection = served, args.root_path or "", vllm_patches.rejection
        _open_beside(edge, app, settings, schedulers, registry, llm)
        if tracer is not None:
            edge.traced = TracedRequests(tracer, settings.served_model_name or settings.model, served)
        edge.on_refused = core.on_refused = reporter.refused
        yield edge
        await core.close()  # what it cuts off is reported, too
        await reporter.leave()


def _clients(stack: AsyncExitStack, settings: GatewaySettings) -> RpcClients:
    """Calls to schedulers, predictors and instances, until the stack is closed."""
    sockets = Sockets.of(settings)
    stack.callback(sockets.close)
    keep = (*settings.schedulers, *settings.predictors, *settings.predictors_beside.values())
    return stack.enter_context(RpcClients(sockets, keep=keep))


def _tell_of_waiting(settings: GatewaySettings, metrics: GatewayMetrics, lines: Lines) -> None:
    """How many wait, of each class of which some may."""
    for name, slo in settings.slo.items():
        if slo.when_full is WhenFull.DELAY:
            metrics.waiting.labels(slo=name).set_function(partial(lines.waiting, name))


def _open_beside(
    edge: Edge,
    app: FastAPI,
    settings: GatewaySettings,
    schedulers: SchedulerClient,
    registry: CollectorRegistry,
    llm: ClusterLLM,
) -> None:
    """What is answered without vLLM's server."""
    edge.open[READY] = ready_of(schedulers)
    edge.open["/metrics"] = exposing(registry, app)
    if settings.lean_streams:
        edge.short = ShortWay(app).of
        edge.open["/health"] = health_of(llm)


async def _vllm_app(args: Any, llm: ClusterLLM) -> tuple[FastAPI, frozenset[str]]:
    """vLLM's API server without an engine in the process, and the paths that it serves."""
    stop_at_first_errors()
    if (tokenizer := llm.renderer.tokenizer) is not None:
        bound_tokenize_texts(tokenizer.max_chars_per_token)
    with keeping_levels():
        app: FastAPI = build_app(args, _TASKS, llm.model_config)
    served = vllm_patches.trim(app)
    vllm_patches.use_parsed_bodies()
    await init_app_state(llm, app.state, args, _TASKS)
    vllm_patches.name_errors(app.state.anthropic_serving_messages)
    vllm_patches.name_tiers(app.state)
    vllm_patches.release_bodies(app.state)
    vllm_patches.score_in_threads(app.state.serving_generative_scoring, llm.renderer)
    return app, served


def _arguments(settings: GatewaySettings) -> Any:
    options: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": settings.served_model_name or settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "renderer_num_workers": SLOTS,
        "disable_uvicorn_access_log": True,
        "disable_log_stats": True,
        **{vllm_options.normal(name): value for name, value in settings.vllm_args.items()},
    }
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm_options.words_of(options))
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    validate_parsed_serve_args(args)
    return args


def prepare_environment() -> None:
    """Before vLLM starts: no weights are loaded here, so nothing of an accelerator is needed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "0")
    os.environ.pop(OWN_TRACES, None)


def run(settings: GatewaySettings, runner: JobRunner | None = None) -> None:
    """Run the gateway on its own event loop."""
    prepare_environment()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(serve(settings, runner))
