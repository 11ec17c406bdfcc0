"""`python -m services.planner`."""

from shared.runtime.signals import end_at_sigterm

end_at_sigterm()  # before the imports, which take seconds

from services.planner.app import create_app
from services.planner.settings import PlannerSettings
from shared.runtime.http import serve
from shared.runtime.logs import configure_logs


def main() -> None:
    """Run the planner until SIGTERM."""
    settings = PlannerSettings.load()
    configure_logs("planner", settings.log_level)
    serve(create_app(settings), settings.http_host, settings.http_port)


if __name__ == "__main__":
    main()
