"""The environment variables of pods: which are secret. Whatever is not known to hold no secret goes into the Secret."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from services.launcher.spec import OURS
from shared.secrecy import SECRET_NAME, SHARED_SECRET, USER_IN_URL

# Variables of other programs that hold no secret. A name that ends like that of a secret, and a value with a URL's user
# information, are secret nevertheless.
_PLAIN = re.compile(
    r"""
    (CUDA|FI|GLOO|HF|KMP|MKL|NCCL|NIXL|OMP|OPENBLAS|PYTORCH|TOKENIZERS|TRANSFORMERS|TRITON|UCX|VLLM)_\w+
    | \w+_(VISIBLE_DEVICES|PROXY|proxy)
    | OTEL_(EXPORTER_OTLP_(TRACES_)?ENDPOINT|EXPORTER_OTLP_PROTOCOL|SERVICE_NAME|TRACES_SAMPLER(_ARG)?)
    | HOME|LANG|LC_ALL|LD_LIBRARY_PATH|NVIDIA_DRIVER_CAPABILITIES|PATH|PYTHONUNBUFFERED|TZ|ZE_AFFINITY_MASK
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Variable:
    """Where a variable has its value from: the text itself, a key of the Secret, or a field of the pod.

    value: also of a secret, if the cluster file gives it. A value with `$(…)` refers to another variable.
    """

    value: str = ""
    secret: str = ""
    field: str = ""

    @property
    def is_plain(self) -> bool:
        return not (self.secret or self.field)

    def entry(self, name: str, secret_name: str) -> dict[str, Any]:
        """The entry of a container's `env`; secret_name: of the Secret object."""
        if self.field:
            return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": self.field}}}
        if self.secret:
            return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": self.secret}}}
        return {"name": name, "value": self.value}


def classify(name: str, value: str, group: str, plain: Collection[str] = ()) -> Variable:
    """A variable of the cluster file, plain or secret. plain: further names of variables without secrets.

    A variable whose name marks it as a secret has one key for all groups, such as `hf-token`; any other secret has a
    key of its own group.
    """
    if _is_plain(name, value, plain):
        return Variable(value)
    key = re.sub(r"^POLYPHASE_[A-Z]+_", "", name).lower().replace("_", "-")
    return Variable(value, secret=key if SHARED_SECRET.search(name) else f"{group}-{key}")


def _is_plain(name: str, value: str, plain: Collection[str]) -> bool:
    if USER_IN_URL.search(value):
        return False
    if name in plain:
        return True
    if SHARED_SECRET.search(name) or (SECRET_NAME.search(name) and not name.startswith(OURS)):
        return False
    if name.startswith(OURS):  # the name of a setting is known, but its value may be a mapping of anything
        return not any(SECRET_NAME.search(key) and text for key, text in _texts(value))
    return _PLAIN.fullmatch(name) is not None


def _texts(value: str) -> Iterator[tuple[str, str]]:
    """Key and text of every text within a value that is JSON."""
    try:
        waiting: list[tuple[str, Any]] = [("", json.loads(value))]
    except ValueError:
        return
    while waiting:
        key, part = waiting.pop()
        if isinstance(part, dict):
            waiting += part.items()
        elif isinstance(part, list):
            waiting += [(key, each) for each in part]
        elif isinstance(part, str):
            yield key, part
