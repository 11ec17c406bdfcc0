"""`python -m gateway`: the API process."""

from shared.runtime.signals import end_at_sigterm

end_at_sigterm()  # before the imports, which take seconds

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from gateway.app import run
from gateway.settings import GatewaySettings
from shared.runtime.logs import configure_logs


def main() -> None:
    settings = GatewaySettings.load()
    configure_logs("gateway", settings.log_level)
    run(settings)


if __name__ == "__main__":
    main()
