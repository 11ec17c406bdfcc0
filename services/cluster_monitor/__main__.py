"""`python -m services.cluster_monitor`."""

from shared.runtime.signals import end_at_sigterm

end_at_sigterm()  # before the imports, which take seconds

from services.cluster_monitor.app import create_app
from services.cluster_monitor.settings import MonitorSettings
from shared.runtime.http import serve
from shared.runtime.logs import configure_logs


def main() -> None:
    """Run the monitor until SIGTERM."""
    settings = MonitorSettings.load()
    configure_logs("cluster_monitor", settings.log_level)
    serve(create_app(settings), settings.http_host, settings.http_port)


if __name__ == "__main__":
    main()
