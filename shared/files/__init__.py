"""Files that people and other programs wrote: one reader for text, JSON records and YAML, and words for their mistakes.

- `text`: UTF-8 text, plain or gzip; lines; JSON and records of JSON
- `yaml_file`: YAML with a bound on depth and aliases, and where its keys stand (`places`)
- `faults`: what pydantic finds wrong, as `file:line: key: reason`

Every error is an InvalidRequest that names the file and, where there is one, the line.
"""
