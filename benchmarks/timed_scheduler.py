"""`python -m benchmarks.timed_scheduler`: the scheduler, which notes in each route when it had the request and when it
had decided, by the clock that all processes of the machine share.
"""

from shared.runtime.signals import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before the imports, which take seconds

import time

import msgspec

from services.global_scheduler import app
from services.global_scheduler.reports import Reports
from services.global_scheduler.settings import SchedulerSettings
from shared.domain.route import Reason, Route
from shared.runtime.http import serve
from shared.runtime.logs import configure_logs
from shared.wire.messages import PlaceRequest
from shared.wire.rpc_server import ServerCall

TIMED = "timed by the bench"


class _TimedReports(Reports):
    def place(self, request: PlaceRequest, call: ServerCall) -> Route:
        received = time.monotonic()
        route = super().place(request, call)
        noted = Reason(TIMED, {"received": received, "decided": time.monotonic()})
        return msgspec.structs.replace(route, reasons=(*route.reasons, noted))


def main() -> None:
    app.Reports = _TimedReports  # type: ignore[attr-defined]
    settings = SchedulerSettings.load()
    configure_logs("global_scheduler", settings.log_level)
    serve(app.create_app(settings), settings.http_host, settings.http_port)


if __name__ == "__main__":
    main()
