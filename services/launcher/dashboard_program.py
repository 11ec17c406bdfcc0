"""The dashboard's command line."""

import sys

from services.launcher.model_source import PROJECT


def dashboard_command(port: int) -> tuple[str, ...]:
    """Streamlit without its questions, on loopback."""
    return (
        sys.executable,
        "-P",
        "-m",
        "streamlit",
        "run",
        str(PROJECT / "dashboard" / "app.py"),
        "--server.port",
        str(port),
        "--server.address",
        "127.0.0.1",
        "--server.headless",
        "true",
        "--browser.gatherUsageStats",
        "false",
    )
