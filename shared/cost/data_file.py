"""Reading a YAML data file, fast where libyaml is there."""

from pathlib import Path
from typing import Any

import yaml

from shared.errors import InvalidRequest
from shared.secrecy import yaml_fault

# The C loader reads the same documents some ten times faster; it is missing where PyYAML was built without libyaml.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an error names the file, and the line where YAML itself is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; `where` names it in errors."""
    try:
        content = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise InvalidRequest(yaml_fault(where, error)) from error
    except ValueError as error:  # of a date or a number that is none
        raise InvalidRequest(f"{where}: a date or a number in it cannot be read: write it in quotes") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidRequest(f"{where}: want a mapping at the top")
    return {str(key): value for key, value in content.items()}
