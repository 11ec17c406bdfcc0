"""A container's health check: exit code 0 if the URL answers 2xx. Run as a file, so that it imports next to nothing."""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def healthy(url: str) -> bool:
    """Whether it answers, and well."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return bool(200 <= answer.status < 300)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if healthy(sys.argv[1]) else 1)
