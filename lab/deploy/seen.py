"""What is seen of a suite in containers, from outside."""

from typing import Any

from lab.deploy.docker import Project, until
from shared.errors import NotFound

MONITOR = "http://127.0.0.1:8200"  # within its container
TOKEN = ("-e", "POLYPHASE_CLUSTER_TOKEN_FILE=/keys/cluster-token")  # of who changes something


class Seen:
    """Of one project."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def instances(self) -> dict[str, dict[str, Any]]:
        """What the monitor knows, by id."""
        return {each["instance_id"]: each for each in self._project.ask("monitor", f"{MONITOR}/instances")}

    def wait_instances(self, *, prefill: int, decode: int) -> dict[str, dict[str, Any]]:
        """Until exactly so many are ready in each role."""

        def ready() -> dict[str, dict[str, Any]]:
            found = {name: each for name, each in self.instances().items() if each["state"] == "ready"}
            roles = [each["role"] for each in found.values()]
            return found if (roles.count("prefill"), roles.count("decode")) == (prefill, decode) else {}

        found: dict[str, dict[str, Any]] = until(ready, 300, f"{prefill} prefill and {decode} decode instances ready")
        return found

    def rows(self) -> int:
        """Requests in the database."""
        query = [
            "psql",
            "-h",
            "/run/postgresql",
            "-U",
            "polyphase",
            "-tAc",
            "select count(*) from requests",
            "polyphase",
        ]
        return int(self._project.compose("exec", "-T", "postgres", *query))

    def all_healthy(self) -> bool:
        """Whether every container that runs is. Raises NotFound when one has failed."""
        states = {c["Name"]: c["State"] for c in self._project.containers()}
        failed = {name: s["ExitCode"] for name, s in states.items() if s["Status"] == "exited" and s["ExitCode"]}
        if failed:
            raise NotFound(f"containers ended: {failed}")
        return all(s["Health"]["Status"] == "healthy" for s in states.values() if s["Status"] != "exited")
