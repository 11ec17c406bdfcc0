"""Every method by its name."""

from shared.errors import InvalidRequest
from shared.plan.methods.best import best
from shared.plan.methods.papers import exhaustive, joint, tabu
from shared.plan.methods.simple import bruteforce, coupled, single_type, thirds
from shared.plan.search import Method

METHODS: dict[str, Method] = {
    "best": best,
    "tabu": tabu,
    "joint": joint,
    "exhaustive": exhaustive,
    "coupled": coupled,
    "thirds": thirds,
    "single_type": single_type,
    "bruteforce": bruteforce,
}
QUICK = ("tabu", "joint", "exhaustive", "coupled", "thirds", "single_type")  # that `best` is compared with


def method(name: str) -> Method:
    """The method of that name. Raises InvalidRequest that names the choices."""
    found = METHODS.get(name)
    if found is None:
        raise InvalidRequest(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return found
