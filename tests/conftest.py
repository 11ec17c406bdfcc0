"""What holds for all tests."""

import os

from hypothesis import settings

# Machines are shared and noisy: no test is judged by its time. In CI the same examples are drawn each time, so that a
# rare one is found by who changes the code and not by who merges.
settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("default")
