"""`python -m services.global_scheduler`."""

from shared.runtime.signals import end_at_sigterm

end_at_sigterm()  # before the imports, which take seconds

from services.global_scheduler.app import create_app
from services.global_scheduler.settings import SchedulerSettings
from shared.runtime.http import serve
from shared.runtime.logs import configure_logs


def main() -> None:
    """Run one scheduler until SIGTERM."""
    settings = SchedulerSettings.load()
    configure_logs("global_scheduler", settings.log_level)
    serve(create_app(settings), settings.http_host, settings.http_port)


if __name__ == "__main__":
    main()
