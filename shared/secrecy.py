"""Secrets in files: which values may be secret, by name or form, and what error messages may repeat of a file."""

import re

import yaml

# One value for all pods of a cluster, where manifests are rendered.
SHARED_SECRET = re.compile(r"(SECRET|TOKEN|PASSWORD|API_KEY|CURVE_PUBLIC|DATABASE_URL)$")
SECRET_NAME = re.compile(r"(secret|token|password|passwd|key|credentials?|headers|authorization)$", re.IGNORECASE)
USER_IN_URL = re.compile(r"://[^/\s@\"']+@")
_URLS = frozenset({"database_url", "endpoint"})  # settings whose value may have a password
_ENVIRONMENT = "env"
_USER_IN_TEXT = re.compile(r"[:/][^\s@]+@")  # also of malformed URLs
_AFTER_A_NAME = re.compile(r"[:=].*", re.DOTALL)
_REPEATED = re.compile(r"(alias|anchor|tag handle|the tag) ('.*?'|\".*?\")(?=;|$)")


def may_be_secret(path: tuple[str | int, ...], value: object) -> bool:
    """Whether the value at that path of a file may be a secret, which messages must not repeat.

    All variables of an `env` count: it is not known which variables of another program hold a secret.
    """
    names = [str(part) for part in path]
    if any(name == _ENVIRONMENT or name in _URLS or SECRET_NAME.search(name) for name in names):
        return True
    return isinstance(value, str) and _USER_IN_TEXT.search(value) is not None


def shown_key(key: str) -> str:
    """A key for a message: without the part after a colon or an equals sign.

    `{HF_TOKEN:value}`, without a space, is YAML for one key that has the value in it.
    """
    return _AFTER_A_NAME.sub("…", key)


def yaml_fault(where: object, error: yaml.YAMLError, text: str = "") -> str:
    """`where:line: …` with the message of YAML's parser, without the file's text.

    `str(error)` would quote the faulty line, and an unquoted secret that begins with `*`, `&` or `!` is an alias, an
    anchor or a tag, which the parser names. text: of the file, to find the line of a character that YAML does not
    allow; the parser gives its place in bytes.
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
