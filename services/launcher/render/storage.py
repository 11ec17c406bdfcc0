"""Volumes that outlive pods, and a database on one, for trying out."""

from services.launcher.render.objects import SUITE, Manifest, manifest
from services.launcher.render.options import RenderOptions

_NAME = "postgres"
_LABELS = {"app.kubernetes.io/name": _NAME, "app.kubernetes.io/instance": _NAME}
_USER = 999  # of the official image


def claim(name: str, size: str, storage_class: str) -> Manifest:
    """A template of a StatefulSet."""
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def postgres(options: RenderOptions) -> list[Manifest]:
    """One pod and its Service: no replica, no backup."""
    said = options.postgres
    security = {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": security,
        "containers": [_server(options)],
    }
    spec = {
        "serviceName": _NAME,
        "replicas": 1,
        "selector": {"matchLabels": _LABELS},
        "template": {"metadata": {"labels": {"app.kubernetes.io/part-of": SUITE, **_LABELS}}, "spec": pod},
        "volumeClaimTemplates": [claim("data", said.size, said.storage_class)],
    }
    port = {"name": "postgres", "port": 5432}
    service = {"spec": {"clusterIP": "None", "selector": _LABELS, "ports": [port]}}
    return [
        manifest("v1", "Service", _NAME, options.namespace, service),
        manifest("apps/v1", "StatefulSet", _NAME, options.namespace, {"spec": spec}),
    ]


def _server(options: RenderOptions) -> Manifest:
    ready = {"exec": {"command": ["pg_isready", "-U", "polyphase"]}, "periodSeconds": 2}
    return {
        "name": _NAME,
        "image": options.postgres.image,
        "env": [
            {"name": "POSTGRES_USER", "value": "polyphase"},
            {"name": "PGDATA", "value": "/var/lib/postgresql/data/pgdata"},
            {
                "name": "POSTGRES_PASSWORD",
                "valueFrom": {"secretKeyRef": {"name": options.secret, "key": "postgres-password"}},
            },
        ],
        "ports": [{"name": "postgres", "containerPort": 5432}],
        "startupProbe": {**ready, "failureThreshold": 60},
        "readinessProbe": ready,
        "livenessProbe": {**ready, "periodSeconds": 10, "timeoutSeconds": 5},
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "data", "mountPath": "/var/lib/postgresql/data"}],
    }
