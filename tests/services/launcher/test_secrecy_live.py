"""Secrets are planted wherever an operator can put one. Then a suite serves, fails and is operated, and all that it
shows is searched for them: logs, output, the database, answers of every route, command lines, files, manifests, and
what the command prints.
"""

import base64
import json
import os
import shutil
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest
import yaml
from fastapi.routing import APIRoute
from sqlalchemy import MetaData, select

from services.launcher.cluster_keys import add_key, curve_pair
from services.launcher.suite import Suite, until
from shared.runtime.keys import digest_of
from shared.store.database import open_engine
from tests.ports import free_port
from tests.services.all_apps import all_apps
from tests.services.launcher.up import polyphase, running
from tests.shared.store.postgres_server import PostgresServer, postgres_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MARK = "Xyzzy"  # in each secret that the test may choose; nothing else has it
TOKEN = f"{MARK}-cluster-token-0123456789"
USER = f"user:{MARK}-word"
ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": f"{MARK}-aws",
    "HF_TOKEN": f"{MARK}-hf",
    "OTEL_EXPORTER_OTLP_HEADERS": f"x-key={MARK}-sent,authorization {MARK}-cannot-be-read",
    "HTTPS_PROXY": f"http://{USER}@127.0.0.1:9",
    "WANDB_API_KEY": f"{MARK}-wandb",
    "SOMETHING_ELSE": f"{MARK}-else",
}
EMULATED = {"engine": "emulated", "accelerator": "A100-SXM-80", "kv_cache_bytes": 1 << 30}
# Those that may hold secrets, of the folder that the operator gives the suite; each is readable by its owner only.
KEPT = {"cluster-token"}


@dataclass
class Planted:
    """The secrets, and everything that was shown. `digests`: of API keys; none opens anything."""

    secrets: dict[str, str]
    digests: dict[str, str]
    shown: dict[str, bytes] = field(default_factory=dict)

    def keep(self, where: str, text: str | bytes) -> None:
        """Something that was shown, for the search at the end."""
        at = where if where not in self.shown else f"{where} ({len(self.shown)})"
        self.shown[at] = text.encode() if isinstance(text, str) else text

    def found(self) -> list[str]:
        """Where which secret is; also as JSON, URLs and basic authentication write it."""
        needles = {}
        for name, secret in {**self.secrets, **self.digests}.items():
            forms = {secret, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
            needles[name] = {*(form.encode() for form in forms), base64.b64encode(secret.encode())}
        return [
            f"{where}: {name}: …{_around(text, form)}…"
            for where, text in self.shown.items()
            for name, forms in needles.items()
            for form in forms
            if form.lower() in text.lower()
        ]


def _around(text: bytes, form: bytes) -> str:
    at = text.lower().index(form.lower())
    return text[max(0, at - 120) : at + len(form) + 20].decode(errors="replace")


@contextmanager
def database() -> Iterator[tuple[str, PostgresServer | None]]:
    """A URL with a password, where there is PostgreSQL; else empty: SQLite in the data folder."""
    if not all(shutil.which(name) for name in ("initdb", "pg_ctl", "postgres")):
        yield "", None
        return
    with postgres_server() as server:
        yield server.url.replace("polyphase@", f"polyphase:{MARK}-database@"), server


@dataclass
class Live:
    """The suite that is searched."""

    suite: Suite
    planted: Planted
    folder: Path
    server: PostgresServer | None
    database_url: str
    api_key: str

    async def ask(self, path: str, body: Any, key: str, method: str = "POST", **headers: str) -> httpx.Response:
        """A call of the API; its answer is kept for the search."""
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
            sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
            url = f"{self.suite.state.api_url}{path}"
            answer = await http.request(method, url, headers={**authorization, **headers}, **sent)
        self.planted.keep(f"{method} {path}", answer.content + str(answer.headers).encode())
        return answer

    async def command(self, *words: str, **environment: str) -> int:
        """The exit code of a command; what it prints is kept."""
        code, text = await polyphase(*words, **{**ENVIRONMENT, "COLUMNS": "300", **environment})
        self.planted.keep(f"polyphase {' '.join(words)}", text)
        return code

    async def at(self, *words: str, **environment: str) -> int:
        """The same of a command that is given the suite's data folder."""
        return await self.command(*words, "--data-dir", str(self.suite.data_dir), **environment)


@asynccontextmanager
async def live(folder: Path) -> AsyncIterator[Live]:
    pair, keys = curve_pair(), folder / "keys.yaml"
    api_key = add_key(keys, "ann")
    entries = yaml.safe_load(keys.read_text())
    keys.write_text(yaml.safe_dump([{**entries[0], "cache_salt": f"{MARK}-salt"}]))
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    secrets = {"mark": MARK, "curve_secret": pair["curve_secret"], "API key": api_key, "user": USER}
    planted = Planted(secrets, {"digest of the API key": digest_of(api_key)})
    with ExitStack() as stack:
        url, server = stack.enter_context(database())
        changes: dict[str, Any] = {
            **pair,
            "cluster_token": TOKEN,
            "tracing": {"endpoint": f"http://{USER}@127.0.0.1:{free_port()}"},
            "gateway": {"port": free_port(), "api_keys_file": str(keys), "env": {"DB_PASSWD": f"{MARK}-of-gateway"}},
            "predictor": {"env": {"DB_PASSWD": f"{MARK}-of-predictor"}},
            "planner": {"env": {"DB_PASSWD": f"{MARK}-of-planner"}},
            "monitor": {"env": {"DB_PASSWD": f"{MARK}-of-monitor"}},
            "scheduler": {"env": {"DB_PASSWD": f"{MARK}-of-scheduler"}},
            "instance_defaults": EMULATED,
            "instances": [
                {"id": "p", "role": "prefill", "count": 2},
                {"id": "d", "role": "decode", "env": {"HF_TOKEN": f"{MARK}-of-instance"}},
            ],
            **({"database_url": url} if url else {}),
        }
        output = folder / "up.out"
        async with running(folder, environment=ENVIRONMENT, output=output, **changes) as (_, suite):
            yield Live(suite, planted, folder, server, url, api_key)
        planted.keep("output of polyphase up", output.read_bytes())
        _keep_files(planted, folder / "data")


def _keep_files(planted: Planted, folder: Path) -> None:
    """All but those that may hold secrets, of which the modes are looked at instead."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {*KEPT, "gateway.log", "monitor.log", "d.log"}
    for file in files:
        if file.name in KEPT:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        else:
            planted.keep(str(file), file.read_bytes())


async def serve(suite: Live) -> None:
    """Good requests and bad ones."""
    key, body = suite.api_key, {"model": "m", "prompt": "Hello", "max_tokens": 8}
    for number in range(4):
        answer = await suite.ask("/v1/completions", {**body, "stream": number % 2 == 0}, key)
        assert answer.status_code == 200, answer.text
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    assert (await suite.ask("/v1/chat/completions", chat, "", **{"X-Api-Key": key})).status_code == 200
    for wrong in (f"{MARK}-wrong", f"{key}x", ""):
        assert (await suite.ask("/v1/completions", body, wrong)).status_code == 401
    assert (await suite.ask("/v1/completions", body, "", **{"X-Api-Key": f"{MARK}-wrong"})).status_code == 401
    assert (await suite.ask("/v1/completions", body, "", authorization=f"Basic {MARK}")).status_code == 401
    for bad in (b"{", b"[]", b'{"model": 5}', b'{"model": "m", "prompt": "x", "n": 0}', b"\xff"):
        answer = await suite.ask("/v1/completions", bad, key, **{"Content-Type": "application/json"})
        assert answer.is_client_error, answer.text
    assert (await suite.ask("/v1/completions", {**body, "model": "another"}, key)).is_client_error
    assert (await suite.ask("/v1/nothing", {}, key)).is_client_error


async def operate(suite: Live) -> None:
    """Roles change, a process is lost and dumps its stacks, a stranger tries: and the database is away for a while."""
    assert await suite.at("flip", "p-1") == 0
    assert await suite.at("drain", "p-1") == 0
    assert await suite.at("resume", "p-1") == 0
    assert await suite.at("flip", "p-9") == 1
    wrong = f"{MARK}-no-token-of-this-cluster"
    assert await suite.at("flip", "p-1", POLYPHASE_CLUSTER_TOKEN=wrong) == 1
    assert await suite.at("policies", "dispatch=random") == 0
    assert await suite.at("policies", "dispatch=rndom") == 1
    async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
        for url, path, body in _changes(suite.suite):
            for token in (TOKEN, wrong, ""):
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                answer = await http.post(url + path, content=body, headers=headers)
                assert answer.is_client_error, answer.text
                suite.planted.keep(f"POST {url}{path}", answer.content)
    for process in suite.suite.state.processes:
        if process.name != "fork-server":
            os.kill(process.pid, signal.SIGUSR1)
    pid = suite.suite.kill("d")
    await suite.suite.restarted("d", pid, 300.0)
    await suite.suite.wait_ready(timeout_s=300.0)
    if suite.server is not None:
        suite.server.stop()
        log = suite.suite.data_dir / "logs" / "scheduler.log"
        size = log.stat().st_size
        answer = await suite.ask("/v1/completions", {"model": "m", "prompt": "Hi", "max_tokens": 2}, suite.api_key)
        assert answer.status_code == 200, answer.text
        await until(lambda: log.stat().st_size > size, 60.0, "the scheduler to miss the database")
        assert await suite.command("migrate", POLYPHASE_DATABASE_URL=suite.database_url) == 1
        suite.server.start()
        assert await suite.command("migrate", "--wait", "30", POLYPHASE_DATABASE_URL=suite.database_url) == 0
    pid = suite.suite.kill("gateway")
    await suite.suite.restarted("gateway", pid, 300.0)


def _changes(suite: Suite) -> list[tuple[str, str, bytes]]:
    state = suite.state
    return [
        (state.monitor_url, "/instances", b'{"instance_id": 5}'),
        (state.monitor_url, "/instances/p-0/flip", b"{"),
        (state.planner_url, "/plans", b'{"inventory": "a: *b"}'),
        (state.predictor_url, "/v1/predict", b"{"),
    ]


async def look(suite: Live) -> None:
    """What the commands print, of a running suite and of files that have secrets in them."""
    for words in (
        *(
            ("status",),
            ("status", "--json"),
            ("top", "--once"),
            ("events",),
            ("events", "--json"),
            ("requests", "--json"),
        ),
        *(("policies",), ("proposals", "--json"), ("explain", "cmpl-"), ("logs", "d"), ("logs", "gateway", "--raw")),
    ):
        await suite.at(*words)
    file, data = suite.folder / "cluster.yaml", str(suite.suite.data_dir)
    assert await suite.command("up", "--cluster", str(file), "--data-dir", data) == 1  # a suite runs there
    render = (
        "render",
        "kubernetes",
        str(file),
        "--model",
        "org/m",
        *(() if suite.database_url else ("--with-postgres",)),
    )
    assert await suite.command(*render) == 0
    out = suite.folder / "manifests"
    assert await suite.command(*render, "--with-secrets", "--out", str(out)) == 0
    secret = out / "10-secret.yaml"
    assert TOKEN in secret.read_text()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    for each in out.iterdir():
        if each != secret:
            suite.planted.keep(each.name, each.read_bytes())
    text = file.read_text()
    for number, wrong in enumerate(
        (
            text.replace("cluster_token: ", "cluster_tokn: "),
            text.replace("cluster_token: ", "cluster_token: *"),
            text.replace("endpoint: http://", "endpoint: http//"),
        )
    ):
        broken = suite.folder / f"wrong-{number}.yaml"
        broken.write_text(wrong)
        other = str(suite.folder / "other")
        assert await suite.command("up", "--cluster", str(broken), "--data-dir", other) == 1
    assert await suite.command("migrate", POLYPHASE_DATABASE_URL=f"postgresql//{USER}@host/db") == 1


async def read_routes(suite: Live) -> int:
    """Every GET of every process, with ids that it knows; how many answered."""
    state = suite.suite.state
    async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
        jobs = (await http.get(f"{state.scheduler_urls[0]}/requests")).json()
        flips = (await http.get(f"{state.monitor_url}/flips")).json()
        ids = {"instance_id": "d", "job_id": jobs[0]["job_id"], "operation_id": flips[0]["operation_id"]}
        apps, answered = all_apps(), 0
        for process in (each for each in state.processes if each.url):
            base = process.url.removesuffix("/health")
            kind = "worker" if process.name in state.instance_ids else process.name
            if kind == "gateway":
                head = {"Authorization": f"Bearer {suite.api_key}"}
                schema = (await http.get(f"{base}/openapi.json", headers=head)).json()
                paths = {"/docs", "/metrics", "/openapi.json", *schema["paths"]}
            else:
                paths = {r.path for r in apps[kind].routes if isinstance(r, APIRoute) and "GET" in (r.methods or ())}
                paths |= {"/health", "/ready", "/openapi.json", "/docs", "/settings", "/nothing"}
            for path in sorted(paths):
                for name, value in ids.items():
                    path = path.replace(f"{{{name}}}", value)
                answer = await http.get(base + path, headers={"Authorization": f"Bearer {suite.api_key}"})
                suite.planted.keep(f"GET {process.name}{path}", answer.content + str(answer.headers).encode())
                answered += answer.status_code == 200
    return answered


async def read_database(suite: Live) -> set[str]:
    """Every row of every table; the tables that have some."""
    url = suite.database_url or f"sqlite:///{suite.suite.data_dir}/polyphase.db"
    engine, metadata = open_engine(url), MetaData()
    filled = set()
    async with engine.connect() as connection:
        await connection.run_sync(metadata.reflect)
        for table in metadata.tables.values():
            rows = (await connection.execute(select(table))).all()
            suite.planted.keep(f"table {table.name}", str(rows))
            filled |= {table.name} if rows else set()
    await engine.dispose()
    return filled


def read_command_lines(suite: Live) -> int:
    """Of the launcher and of all below it, which every user of a machine may read; how many there are."""
    launcher = psutil.Process(suite.suite.state.launcher_pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        for name in ("cmdline", "comm"):
            suite.planted.keep(f"{name} of {process.pid}", Path(f"/proc/{process.pid}/{name}").read_bytes())
    return len(processes)


async def test_a_running_suite_shows_no_secret(tmp_path: Path) -> None:
    async with live(tmp_path) as suite:
        await serve(suite)
        await operate(suite)
        await serve(suite)
        assert await read_routes(suite) >= 40
        assert await read_database(suite) >= {"requests", "events"}
        assert read_command_lines(suite) >= 8
        await look(suite)
        planted = suite.planted
    assert planted.found() == []


async def test_the_search_finds_what_is_there() -> None:
    planted = Planted({"user": USER}, {})
    planted.keep("plain", f"http://{USER}@host")
    planted.keep("header", base64.b64encode(USER.encode()))
    planted.keep("quoted", quote(USER, safe=""))
    planted.keep("nothing", "user")
    assert {each.partition(":")[0] for each in planted.found()} == {"plain", "header", "quoted"}
