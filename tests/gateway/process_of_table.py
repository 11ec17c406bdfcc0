"""One process that counts in a shared table, told on its standard input what to do; it answers with JSON lines.

`python -m tests.gateway.process_of_table TABLE PROCESS MAX_JOBS`
"""

import json
import sys
from pathlib import Path
from typing import Any

from gateway.admission import Admissions, RequestState
from gateway.auth import ApiKey, KeyRates
from gateway.settings import GatewaySettings
from gateway.table import SharedTable
from shared.errors import PolyphaseError

CALLERS = ("a", "b")


def main(path: str, process: str, max_jobs: str) -> None:
    """Until the input ends."""
    settings = GatewaySettings(schedulers=("s",), model="m", max_queued_jobs=int(max_jobs), max_queued_tokens=1000)
    try:
        table = SharedTable(Path(path), int(process))
    except PolyphaseError as error:
        say(error=error.message)
        return
    admissions = Admissions(settings, CALLERS, table)
    rates = KeyRates(table)
    tickets: list[RequestState] = []
    say(ready=True)
    for line in sys.stdin:
        command, argument = line.split()
        try:
            match command:
                case "admit":
                    tickets.append(admissions.for_class("default").admit(argument))
                case "tokens":
                    tickets[-1].start_job(int(argument))
                case "many":
                    say(let_in=[many(admissions) for _ in range(int(argument))].count(True))
                    continue
                case "take":
                    rates.check(ApiKey("a", "", requests_per_s=0.001, burst=40))
                case "rush":
                    say(let_in=[rush(rates) for _ in range(int(argument))].count(True))
                    continue
                case "lock":
                    with table.locked():
                        say(locked=True)
                        sys.stdin.readline()
        except PolyphaseError as error:
            say(error=error.message, retry_after_s=error.retry_after_s)
        else:
            say(jobs=admissions.jobs, tokens=admissions.tokens)


def many(admissions: Admissions) -> bool:
    """One that never leaves."""
    try:
        admissions.for_class("default").admit("a")
    except PolyphaseError:
        return False
    return True


def rush(rates: KeyRates) -> bool:
    """One request of the key."""
    try:
        rates.check(ApiKey("a", "", requests_per_s=0.001, burst=40))
    except PolyphaseError:
        return False
    return True


def say(**told: Any) -> None:
    """To whoever started it."""
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
