"""`python -m predictor` serves until SIGTERM; settings from POLYPHASE_PREDICTOR_…"""

from shared.runtime.signals import end_at_sigterm

end_at_sigterm()  # before the imports, which take seconds

import sys

from predictor.app import build_app
from predictor.settings import PredictorSettings
from shared.runtime.http import serve
from shared.runtime.logs import configure_logs


def main() -> None:
    settings = PredictorSettings.load()
    configure_logs("predictor", settings.log_level)
    # Each operation of the classifier's thread has to acquire the GIL again. With Python's 5 ms a busy event loop
    # doubles the slowest answers (p99 of 8 streams 200 ms; with 0.5 ms 95 ms).
    sys.setswitchinterval(0.0005)
    serve(build_app(settings), settings.host, settings.port)


if __name__ == "__main__":
    main()
