"""The opening of the report: the model answers, on every surface of the API."""

from lab.demo.client import ApiClient
from lab.demo.findings import Section

QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "What is prefill?",
    "List the days of the week.",
    "Tell me a short story about a fox.",
    "Write a short story about a dragon.",
)


async def check_samples(api: ApiClient) -> Section:
    """Some answers to read; and the other surfaces answer too."""
    section = Section("Real answers of a real model")
    rows: list[tuple[str, ...]] = []
    empty = 0
    for question in QUESTIONS:
        answer = await api.chat(question, temperature=0, max_tokens=96)
        choice = answer["choices"][0]
        text = " ".join((choice["message"]["content"] or "").split())
        empty += not text
        rows.append((question, text, str(answer["usage"]["completion_tokens"]), choice["finish_reason"]))
    section.table = (("asked", "answered", "tokens", "ended by"), rows)
    section.equal("questions answered", f"{len(rows)}/{len(rows)}", f"{len(rows) - empty}/{len(rows)}")
    two = await api.chat("Hello!", n=2, temperature=0.8, max_tokens=16)
    section.equal("n = 2 gives two choices", 2, len(two["choices"]))
    detail = await api.chat("Hello!", logprobs=True, top_logprobs=2, max_tokens=4)
    section.check("logprobs", bool(detail["choices"][0]["logprobs"]["content"]), "one a token")
    await _surfaces(section, api)
    return section


async def _surfaces(section: Section, api: ApiClient) -> None:
    said = [{"role": "user", "content": "Hello!"}]
    bodies = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
        "/v1/responses": {"input": "Hello!", "max_output_tokens": 16},
        "/v1/messages": {"messages": said, "max_tokens": 16},
    }
    got = {}
    for path, body in bodies.items():
        got[path] = (await api.post(path, json={"model": api.model, **body})).status_code
    section.equal("other surfaces answer", dict.fromkeys(bodies, 200), got)
