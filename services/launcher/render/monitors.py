"""For Prometheus' operator: every service of ours, each pod as a target."""

from services.launcher.render.objects import METRICS, SUITE, Manifest, manifest
from services.launcher.render.options import RenderOptions


def monitor(options: RenderOptions) -> Manifest:
    """One for all: they have the same path and name of the port."""
    spec = {
        "selector": {"matchLabels": {METRICS: "true"}},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "10s"}],
        "targetLabels": ["app.kubernetes.io/part-of"],
        "podTargetLabels": ["app.kubernetes.io/name", "app.kubernetes.io/instance"],
    }
    return manifest(
        "monitoring.coreos.com/v1", "ServiceMonitor", SUITE, options.namespace, {"spec": spec}, options.monitor_labels
    )
