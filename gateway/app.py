"""Assembles the API process: vLLM's server in front, our pipeline behind it, the limits around it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gateway import surface
from gateway.admission import Admissions
from gateway.auth import LOOPBACK, KeyRing, load_keys
from gateway.connection import StreamProtocol
from gateway.core import ClusterCore, JobRunner
from gateway.edge import Edge
from gateway.grammars import Grammars
from gateway.lengths import LengthClient
from gateway.lines import Lines
from gateway.llm import ClusterLLM
from gateway.metrics import GatewayMetrics
from gateway.pace import PERIOD_S as PACE_S
from gateway.pace import Pace
from gateway.pipeline import Pipeline
from gateway.plain import serve_plain_streams
from gateway.recording import recording
from gateway.reports import PERIOD_S, Reporter
from gateway.settings import GatewaySettings
from shared.domain.job import WhenFull
from shared.errors import InvalidRequest
from shared.runtime.http import SHUTDOWN_S
from shared.runtime.logs import get_log
from shared.runtime.tasks import background
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.rpc_clients import SWEEP_S, RpcClients
from shared.wire.sockets import Curve, Sockets

log = get_log(__name__)
_TASKS = ("generate",)


async def serve(settings: GatewaySettings, runner: JobRunner | None = None) -> None:
    """Serve until SIGTERM or SIGINT; `runner` takes the pipeline's place. Raises InvalidRequest for bad settings."""
    keys = KeyRing(load_keys(settings.api_keys_file) if settings.api_keys_file else ())
    keys.require_classes(settings.slo)
    if keys.open and settings.host not in LOOPBACK:
        raise InvalidRequest(f"listening on {settings.host} needs API keys (api_keys_file); without, only loopback")
    async with running(settings, keys, runner) as app:
        await http_server(app, settings.host, settings.port).serve()


def http_server(app: Edge, host: str, port: int) -> uvicorn.Server:
    """The HTTP server in front of everything."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        http=StreamProtocol,
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_S,
        timeout_keep_alive=30,
    )
    return uvicorn.Server(config)


@asynccontextmanager
async def running(settings: GatewaySettings, keys: KeyRing, runner: JobRunner | None = None) -> AsyncIterator[Edge]:
    """The whole application with everything behind it started; stopped in reverse at the end of the block."""
    async with AsyncExitStack() as stack:
        args = _arguments(settings)
        config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
        grammars = stack.enter_context(Grammars(config, settings))
        curve = Curve(settings.curve_public, settings.curve_secret) if settings.curve_public else None
        sockets = Sockets(curve)
        stack.callback(sockets.close)
        keep = (*settings.schedulers, *settings.predictors)
        clients = stack.enter_context(RpcClients(sockets, keep=keep))
        schedulers = SchedulerClient(clients, settings.schedulers)
        metrics = GatewayMetrics(settings.served_model_name or settings.model)
        tasks = await stack.enter_async_context(background())
        recorder = await stack.enter_async_context(recording(settings, metrics, tasks))
        reporter = Reporter(schedulers, metrics, recorder)
        tasks.every("reports", PERIOD_S, reporter.flush)
        tasks.start("grammars", grammars.watch())
        tasks.every("rpc clients", SWEEP_S, clients.sweep)
        lengths = LengthClient(clients, settings, metrics.predictions)
        stack.push_async_callback(lengths.close)
        lines = Lines(keys.weights)
        for name, slo in settings.slo.items():
            if slo.when_full is WhenFull.DELAY:
                metrics.waiting.labels(slo=name).set_function(partial(lines.waiting, name))
        pace = Pace()
        tasks.every("pace", PACE_S, pace.look)
        jobs = runner or Pipeline(settings, clients, schedulers, reporter, lengths, lines)
        core = ClusterCore(settings, jobs, pace)
        stack.push_async_callback(core.close)
        admission = Admissions(settings, keys.count)
        metrics.queued.set_function(lambda: admission.jobs)
        llm = ClusterLLM(config, core, grammars)
        stack.callback(llm.shutdown)
        app = await _vllm_app(args, llm)
        if settings.lean_streams:
            serve_plain_streams(app.state, direct=surface.bodies_pass(app))
        yield Edge(app, settings, keys, metrics, admission)
        await reporter.flush()


async def _vllm_app(args: Any, llm: ClusterLLM) -> FastAPI:
    """vLLM's API server without an engine in the process."""
    app: FastAPI = build_app(args, _TASKS, llm.model_config)
    surface.trim(app)
    await init_app_state(llm, app.state, args, _TASKS)
    surface.name_errors(app.state.anthropic_serving_messages)
    surface.name_tiers(app.state)
    return app


def _arguments(settings: GatewaySettings) -> Any:
    options: dict[str, Any] = {
        "model": settings.model,
        "served-model-name": settings.served_model_name or settings.model,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        **settings.vllm_args,
    }
    words = ["--disable-uvicorn-access-log", "--disable-log-stats"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value not in (False, None):
            words += [flag, str(value)]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    return args


def prepare_environment() -> None:
    """Before vLLM starts: no weights are loaded here, so nothing of an accelerator is needed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "0")


def run(settings: GatewaySettings, runner: JobRunner | None = None) -> None:
    """Run the gateway on its own event loop."""
    prepare_environment()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(serve(settings, runner))
