"""`make pods-check`: runs rendered Kubernetes pods as containers of one Docker network, without Kubernetes.

Each has the pod's environment, names, user and read-only root. The processes must start as rendered, find each other by
the names of Services, become ready, answer, and end in order.

Run as `python -m benchmarks.deploy.pods_check [--image polyphase:check]`.
"""

import argparse
import asyncio
import json
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import SecretStr
from rich.console import Console

from benchmarks.demo.report import Check, Report, Section
from benchmarks.deploy.compose_check import PROMPT
from benchmarks.deploy.containers import compose_command, docker, postgres_image, succeeds
from benchmarks.suite import run_command
from services.launcher.cluster_file import CLUSTERS, Cluster, load_cluster
from services.launcher.cluster_keys import add_key, curve_pair
from services.launcher.render.groups import Manifest
from services.launcher.render.manifests import render
from services.launcher.render.options import RenderOptions
from services.launcher.suite import until
from shared.runtime.keys import new_token
from tools.client import ApiClient, Ask

_SUBNET = "10.213"  # a private network that is rarely in use


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a workload, with what Kubernetes would give it."""

    name: str
    spec: Manifest
    environment: dict[str, str]
    aliases: tuple[str, ...]
    address: str

    @property
    def container(self) -> Manifest:
        found: Manifest = self.spec["containers"][0]
        return found

    @property
    def http_port(self) -> int:
        return next(int(port["containerPort"]) for port in self.container["ports"] if port["name"] == "http")


class Pods:
    """The rendered pods as containers of one network. key: an API key of the gateway."""

    def __init__(self, objects: list[Manifest], secret: dict[str, str], folder: Path, key: str) -> None:
        self.key = key
        self._objects = objects
        self._secret = secret
        self._folder = folder
        self._mark = f"polyphase-pods-{secrets.token_hex(3)}"
        self.pods = list(self._all())

    def start(self) -> None:
        """Start the network, then all pods, each after its init containers."""
        docker("network", "create", "--subnet", f"{_SUBNET}.0.0/16", self._mark)
        for pod in self.pods:
            for container in pod.spec.get("initContainers", []):
                command = (container["image"], *container["command"][1:])
                docker("run", "--rm", *self._options(pod, container), *command, timeout_s=150)
            words = ["--name", f"{self._mark}-{pod.name}", "--ip", pod.address]
            words += [word for each in pod.aliases for word in ("--network-alias", each)]
            command = (pod.container["image"], *pod.container.get("command", [""])[1:])
            docker("run", "-d", *words, *self._options(pod, pod.container), *command)

    def ready(self, pod: Pod) -> bool:
        """The result of the readiness probe. Raises AssertionError when the pod has ended."""
        state = json.loads(docker("inspect", f"{self._mark}-{pod.name}"))[0]["State"]
        if not state["Running"]:
            log = run_command(["sh", "-c", f"docker logs --tail 20 {self._mark}-{pod.name} 2>&1"])
            raise AssertionError(f"{pod.name} ended with code {state['ExitCode']}: {log[-3000:]}")
        probe = pod.container["readinessProbe"]
        if "exec" in probe:
            words = probe["exec"]["command"]
        else:
            url = f"http://127.0.0.1:{pod.http_port}{probe['httpGet']['path']}"
            words = ["python3", "-S", "-c", f"import urllib.request as u; u.urlopen({url!r}, timeout=2)"]
        return succeeds("exec", f"{self._mark}-{pod.name}", *words)

    def stop(self, pod: Pod) -> tuple[float, int]:
        """Stop a pod as Kubernetes does; returns the seconds that it took, and its exit code."""
        began, name = time.monotonic(), f"{self._mark}-{pod.name}"
        docker("stop", "-t", str(pod.spec["terminationGracePeriodSeconds"]), name)
        code = int(docker("inspect", "-f", "{{.State.ExitCode}}", name))
        return time.monotonic() - began, code

    def remove(self) -> None:
        found = docker("ps", "-aq", "--filter", f"name={self._mark}-").split()
        if found:
            docker("rm", "-f", "-v", *found)
        docker("network", "rm", self._mark)

    def _all(self) -> Iterator[Pod]:
        number = 0
        services = [each for each in self._objects if each["kind"] == "Service"]
        for each in self._objects:
            if each["kind"] not in ("StatefulSet", "Deployment"):
                continue
            template = each["spec"]["template"]
            labels = template["metadata"]["labels"]
            plain = [s["metadata"]["name"] for s in services if s["spec"]["selector"].items() <= labels.items()]
            for index in range(each["spec"]["replicas"]):
                number += 1
                name, address = f"{each['metadata']['name']}-{index}", f"{_SUBNET}.1.{number}"
                own = f"{name}.{each['spec']['serviceName']}" if "serviceName" in each["spec"] else name
                environment = self._environment(template["spec"]["containers"][0], name, address)
                yield Pod(name, template["spec"], environment, (own, *plain), address)

    def _environment(self, container: Manifest, name: str, address: str) -> dict[str, str]:
        maps = {each["metadata"]["name"]: each["data"] for each in self._objects if each["kind"] == "ConfigMap"}
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= maps[source["configMapRef"]["name"]]
        fields = {"metadata.name": name, "status.podIP": address}
        for each in container.get("env", []):
            if "value" in each:
                found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda other: found[other[1]], each["value"])
            elif "secretKeyRef" in each["valueFrom"]:
                found[each["name"]] = self._secret[each["valueFrom"]["secretKeyRef"]["key"]]
            else:
                found[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        return found

    def _options(self, pod: Pod, container: Manifest) -> list[str]:
        """Options of `docker run` that do what the pod's specification says."""
        user = pod.spec["securityContext"]
        environment = (
            pod.environment if container is pod.container else self._environment(container, pod.name, pod.address)
        )
        words = ["--network", self._mark, "--hostname", pod.name, "--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += [word for key, value in environment.items() for word in ("-e", f"{key}={value}")]
        if container["securityContext"].get("readOnlyRootFilesystem"):
            words.append("--read-only")
        for mount in container["volumeMounts"]:
            if mount["name"] == "keys":
                words += ["-v", f"{self._folder}:{mount['mountPath']}:ro"]
            else:
                words += ["--tmpfs", f"{mount['mountPath']}:mode=1777,exec"]
        if command := container.get("command"):
            words += ["--entrypoint", command[0]]
        return [*words, *(["-w", container["workingDir"]] if "workingDir" in container else [])]


def cluster_for(folder: Path, file: Path) -> Cluster:
    cluster = load_cluster(file)
    gateway = cluster.gateway.model_copy(update={"api_keys_file": str(folder / "keys.yaml")})
    return cluster.model_copy(update={**curve_pair(), "gateway": gateway, "cluster_token": SecretStr(new_token())})


async def start(pods: Pods, section: Section) -> None:
    """The processes start as rendered, and find each other by the names of Services."""
    began = time.monotonic()
    pods.start()
    for pod in pods.pods:
        await until(partial(pods.ready, pod), 300, f"{pod.name} to be ready", poll_s=0.5)
        section.lines.append(f"{pod.name:14} ready after {time.monotonic() - began:5.1f} s")


async def answer(pods: Pods, section: Section) -> None:
    gateway = next(pod for pod in pods.pods if pod.name.startswith("gateway"))
    async with ApiClient(f"http://{gateway.address}:{gateway.http_port}", "demo", pods.key) as api:
        response = await api.stream(Ask(PROMPT, 48, "pods-check"))
    section.equal("tokens of an answer", (48, ""), (len(response.tokens), response.error))


async def stop(pods: Pods, section: Section) -> None:
    for pod in reversed(pods.pods):
        took_s, code = pods.stop(pod)
        section.check(f"{pod.name} ended", code in (0, 143), "code 0 or 143", f"code {code} after {took_s:.1f} s")


CHECKS: dict[str, Check[Pods]] = {"All pods become ready": start, "They answer": answer, "They end in order": stop}


def main() -> None:
    """Exit code 1: a step failed; 2: there is no Docker."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--image", default="polyphase:check", help="as `make compose-check` builds it")
    options.add_argument("--cluster", type=Path, default=CLUSTERS / "laptop.yaml", help="a cluster file")
    given = options.parse_args()
    compose_command("pods-check")
    report = Report(Console())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = add_key(folder / "keys.yaml", "check")
        folder.chmod(0o755)
        (folder / "keys.yaml").chmod(0o644)
        chosen = RenderOptions(image=given.image, postgres={"enabled": True, "image": postgres_image()})
        rendered = render(cluster_for(folder, given.cluster), chosen, str(given.cluster), with_secrets=True)
        (secret,) = (each for each in rendered.objects if each["kind"] == "Secret")
        pods = Pods(rendered.objects, secret["stringData"], folder, key)
        try:
            asyncio.run(report.run(CHECKS, pods, stop=True))
        finally:
            pods.remove()
    report.summarise()
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
