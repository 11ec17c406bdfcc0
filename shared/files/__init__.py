"""Readers of files from people and other programs: text, JSON records and YAML, and error messages about them.

- `text`: UTF-8 text, plain or gzip; lines; JSON and records of JSON
- `yaml_file`: YAML with bounds on depth and aliases, and the lines of its keys (`places`)
- `faults`: pydantic's errors, as `file:line: key: reason`

Errors are InvalidRequest, with the file and, where there is one, the line.
"""
