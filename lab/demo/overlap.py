"""Promise 6: the first token does not wait for the KV transfer, and comes once."""

from lab.demo import jobs
from lab.demo.client import ApiClient, Ask
from lab.demo.findings import Section
from lab.demo.identity import asks, reference
from lab.demo.prompts import Prompts
from services.launcher.suite import Suite
from shared.timeline import Span

REQUESTS = 5
TOKENS = 16


async def check_first_token(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """Long prompts, one at a time; the timelines say what came first."""
    section = Section("The first token leaves before the decode instance goes on")
    chosen = prompts.various(REQUESTS, 900, 1100, seed=5)
    plain = await reference(suite, api, chosen, TOKENS)
    wanted: list[Ask] = asks(chosen, TOKENS)
    answers = [await api.stream(ask) for ask in wanted]
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    leads = [_lead_s(record) for record in found]
    section.equal(
        "first token before the first step of the decode instance",
        f"{REQUESTS}/{REQUESTS}",
        f"{sum(lead > 0 for lead in leads)}/{REQUESTS}",
    )
    same = sum(a.tokens == b.tokens for a, b in zip(plain, answers, strict=True))
    section.equal("no token twice or missing", f"{REQUESTS}/{REQUESTS}", f"{same}/{REQUESTS}")
    section.figures["first_token_lead_ms"] = sorted(leads)[len(leads) // 2] * 1e3
    section.lines.append("Lead over the decode instance: " + ", ".join(f"{lead * 1e3:.1f} ms" for lead in leads))
    return section


def _lead_s(record: jobs.JobRecord) -> float:
    """How long before the first step of the decode instance the first token was there; 0 when there was no transfer."""
    if not record.pulled:
        return 0.0
    decode = next(span for span in record.timeline["spans"] if span["span"] == Span.DECODE)
    return float(decode["started_s"]) - float(record.timeline["first_token_s"])
