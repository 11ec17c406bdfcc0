"""What may hold a secret, by its name or by its looks, and what of a file's text an error message may repeat."""

import re

import yaml

# One value for all pods of a cluster, where manifests are rendered.
SHARED_SECRET = re.compile(r"(SECRET|TOKEN|PASSWORD|API_KEY|CURVE_PUBLIC|DATABASE_URL)$")
SECRET_NAME = re.compile(r"(secret|token|password|passwd|key|credentials?|headers|authorization)$", re.IGNORECASE)
USER_IN_URL = re.compile(r"://[^/\s@\"']+@")
_URLS = frozenset({"database_url", "endpoint"})  # settings whose value may have a password
_ENVIRONMENT = "env"
_USER_IN_TEXT = re.compile(r"[:/][^\s@]+@")  # also of what was meant to be a URL
_AFTER_A_NAME = re.compile(r"[:=].*", re.DOTALL)
_REPEATED = re.compile(r"(alias|anchor|tag handle|the tag) ('.*?'|\".*?\")(?=;|$)")


def may_be_secret(path: tuple[str | int, ...], value: object) -> bool:
    """Whether the value at that path of a file may not be repeated in a message.

    Every variable of an `env` counts: which of another program's variables hold a secret is not known.
    """
    names = [str(part) for part in path]
    if any(name == _ENVIRONMENT or name in _URLS or SECRET_NAME.search(name) for name in names):
        return True
    return isinstance(value, str) and _USER_IN_TEXT.search(value) is not None


def shown_key(key: str) -> str:
    """A key as a message may name it: without what follows a colon or an equals sign.

    `{HF_TOKEN:value}`, without a space, is YAML for one key that has the value in it.
    """
    return _AFTER_A_NAME.sub("…", key)


def yaml_fault(where: object, error: yaml.YAMLError, text: str = "") -> str:
    """`where:line: …` with what YAML's parser says, and none of the file's own text.

    text: the file's, to find the line of a character that YAML does not allow; the parser gives its place in bytes.

    `str(error)` quotes the line that is wrong. And a secret that begins with `*`, `&` or `!` and is not in quotes is an
    alias, an anchor or a tag, which the parser names.
    """
    if not isinstance(error, yaml.MarkedYAMLError):
        at = error.position if isinstance(error, yaml.reader.ReaderError) else None
        line = f":{text.encode(errors='replace')[:at].count(10) + 1}" if text and at is not None else ""
        return f"{where}{line}: not valid YAML: {str(error).splitlines()[0]}"
    mark = error.problem_mark or error.context_mark
    said = ", ".join(part for part in (error.context, error.problem) if part)
    line = f":{mark.line + 1}" if mark else ""
    return f"{where}{line}: not valid YAML: {_without_names(said)}"


def _without_names(said: str) -> str:
    return _REPEATED.sub(r"\1 '…'", said)
