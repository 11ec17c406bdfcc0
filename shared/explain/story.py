"""The explanation of a request: a headline, and a sentence for each decision, span and transfer."""

from collections.abc import Iterator

import msgspec

from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.verdict import count, duration, size
from shared.explain.reasons import LOCAL, phrase
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord

LEAST_S = 0.001  # shorter spans are left out
COMPLETED = ("stop", "length", "repetition")
_SPANS = {
    Span.INTAKE: "It was read and tokenised in {time}.",
    Span.PLACEMENT: "A place was found after {time}.",
    Span.HANDOVER: "The way to {where} took {time}.",
    Span.QUEUE: "It waited {time} in the queue of {where}.",
    Span.PREFILL: "{where} computed its prompt in {time}.",
    Span.REPLY: "The reply of {where} took {time}.",
    Span.TRANSFER: "Its KV came to {where} within {time}.",
    Span.DECODE_QUEUE: "It waited {time} for its first step on {where}.",
    Span.DECODE: "{where} produced its tokens in {time}.",
    Span.PAUSED: "It was paused for {time}: {where} took its KV memory back for other requests.",
    Span.RECOMPUTED: "{where} computed its tokens again in {time}, until the next one was there.",
    Span.LOST: "{where} did not bring it to an end: {time} are lost.",
}
_FOR_ROOM = "It waited {time} for room for its KV on {where}."
_OF_WHICH = {
    Span.INTAKE: "to read it",
    Span.PLACEMENT: "until it had a place",
    Span.HANDOVER: "on the way to {where}",
    Span.QUEUE: "in the queue of {where}",
    Span.PREFILL: "in prefill on {where}",
    Span.REPLY: "on the way back from {where}",
    Span.TRANSFER: "for its KV to come to {where}",
    Span.DECODE_QUEUE: "until its first step on {where}",
    Span.DECODE: "in decode on {where}",
    Span.PAUSED: "paused on {where}, without KV memory",
    Span.RECOMPUTED: "computed again on {where}",
    Span.LOST: "lost on {where}",
}


class Sentence(msgspec.Struct, frozen=True):
    """One step. at_s: seconds since the arrival, None where that is not known. figures: of the decision or span."""

    at_s: float | None
    text: str
    figures: dict[str, float | str] = {}
    span: Span | None = None


class Explanation(msgspec.Struct, frozen=True):
    """The whole explanation, in order of time."""

    headline: str
    steps: tuple[Sentence, ...]


def explain(timeline: RequestTimeline) -> Explanation:
    """The explanation of a request, which may be under way."""
    found = [
        *_arrival(timeline),
        *_decisions(timeline),
        *_spans(timeline),
        *_transfers(timeline),
        *_longest_gap(timeline),
        *_prediction(timeline),
    ]
    found.sort(key=lambda one: one.at_s if one.at_s is not None else 0.0)
    return Explanation(_headline(timeline), tuple(found))


def _headline(timeline: RequestTimeline) -> str:
    outcome, ended_s = timeline.outcome, timeline.ended_s
    after = f" after {duration(max(0.0, ended_s - timeline.arrived_s))}" if ended_s else ""
    if outcome in COMPLETED:
        began = f"Completed ({outcome})"
    elif outcome == "cancelled":
        began = f"Cancelled by its client{after}"
    elif outcome:
        began = f"Failed{after} ({outcome})"
    else:
        began = f"Under way{_stands(timeline)}"
    return f"{began}: {'; '.join(_course(timeline))}."


def _stands(timeline: RequestTimeline) -> str:
    last = max(timeline.spans, key=lambda span: span.ended_s, default=None)
    return f", {duration(max(0.0, last.ended_s - timeline.arrived_s))} known" if last is not None else ""


def _course(timeline: RequestTimeline) -> Iterator[str]:
    ttft_s, tpot_s = timeline.ttft_s, timeline.tpot_s
    if ttft_s is None:
        yield "no token yet" if not timeline.outcome else "no token"
        return
    longest = _longest(timeline)
    yield f"the first token after {duration(ttft_s)}" + (f", of which {longest}" if longest else "")
    if tpot_s is not None:
        yield f"{count(timeline.output_tokens, 'token')}, one each {duration(tpot_s)}"
    if timeline.gaps:
        after = f"after token {timeline.longest_gap_after:,}"
        yield f"the longest gap between two of them {duration(timeline.longest_gap_s)}, {after}"
    moved = sum(decision.kind == "move" for decision in timeline.decisions)
    if moved:
        yield f"moved {'once' if moved == 1 else f'{moved} times'} because it was paused"
    if (attempts := max((span.attempt for span in timeline.spans), default=1) - moved) > 1:
        yield f"{attempts} attempts"


def _prediction(timeline: RequestTimeline) -> Iterator[Sentence]:
    """What the estimate of the first placement predicted, beside what came of it."""
    estimated, predicted_s = timeline.estimated, timeline.predicted_ttft_s
    if estimated is None or predicted_s is None:
        return
    figures: dict[str, float | str] = {"predicted_ttft_s": predicted_s, "predicted_tpot_s": estimated.tpot_s}
    said = f"Its first token was predicted after {duration(predicted_s)}"
    if (ttft_s := timeline.ttft_s) is not None:
        said, figures["ttft_s"] = f"{said} and came after {duration(ttft_s)}", ttft_s
    said += f"; each further one was predicted to take {duration(estimated.tpot_s)}"
    if (tpot_s := timeline.tpot_s) is not None:
        said, figures["tpot_s"] = f"{said} and took {duration(tpot_s)}", tpot_s
    yield Sentence(timeline.placed_s - timeline.arrived_s, f"{said}.", figures)


def _longest(timeline: RequestTimeline) -> str:
    """The longest span before the first token."""
    before = [span for span in timeline.spans if span.started_s < timeline.first_token_s]
    longest = max(before, key=lambda span: min(span.ended_s, timeline.first_token_s) - span.started_s, default=None)
    if longest is None:
        return ""
    took_s = min(longest.ended_s, timeline.first_token_s) - longest.started_s
    where = longest.instance_id or "the gateway"
    return f"{duration(took_s)} {_OF_WHICH[longest.span].format(where=where)}" if took_s >= LEAST_S else ""


def _longest_gap(timeline: RequestTimeline) -> Iterator[Sentence]:
    """The longest gap between tokens, the spans during it, and the number of gaps over the target."""
    if not timeline.gaps:
        return
    gap_s, ended_s, after = timeline.longest_gap_s, timeline.longest_gap_at_s, timeline.longest_gap_after
    began_s = ended_s - gap_s
    said = f"The longest gap between its tokens, {duration(gap_s)}, came between token {after:,} and the next"
    parts = [
        f"{duration(inside_s)} {_OF_WHICH[span.span].format(where=span.instance_id or 'the gateway')}"
        for span in sorted(timeline.spans, key=lambda one: one.started_s)
        if (inside_s := min(span.ended_s, ended_s) - max(span.started_s, began_s)) >= LEAST_S
    ]
    if parts:
        said += f": {', '.join(parts)}"
    over = f"{count(timeline.gaps_over, 'gap')} of {timeline.gaps:,} exceeded the target of {duration(timeline.itl_s)}"
    figures: dict[str, float | str] = {"gap_s": gap_s, "after_tokens": after, "gaps_over": timeline.gaps_over}
    yield Sentence(began_s - timeline.arrived_s, f"{said}. {over}.", figures)


def _arrival(timeline: RequestTimeline) -> Iterator[Sentence]:
    yield Sentence(0.0, f"It came with a prompt of {count(timeline.prompt_tokens, 'token')}.")


def _decisions(timeline: RequestTimeline) -> Iterator[Sentence]:
    for decision in timeline.decisions:
        figures: dict[str, float | str] = {}
        for reason in decision.reasons:
            figures |= {name: value for name, value in reason.figures.items() if name not in figures}
        text = sentence(decision, timeline.prompt_tokens)
        yield Sentence(decision.time_s - timeline.arrived_s, text, figures)


def sentence(decision: Decision, prompt_tokens: int = 0) -> str:
    why = "; ".join(said for reason in decision.reasons if (said := phrase(reason)))
    lead = _lead(decision, prompt_tokens)
    return f"{lead}: {why}." if why else f"{lead}."


def _lead(decision: Decision, prompt_tokens: int) -> str:
    chosen = decision.chosen
    match decision.kind:
        case "placement":
            return _placed(decision, prompt_tokens)
        case "dispatch":
            return f"Decode went to {chosen}"
        case "split":
            return f"Of its prompt {chosen} were computed apart"
        case "codec":
            return f"Its KV was sent as {chosen}" if chosen != "raw" else "Its KV was sent as it is"
        case "precision":
            return f"{chosen} computes at another precision than a part before"
        case "prediction":
            return f"Its answer was predicted to have {chosen}"
        case "full":
            return f"{chosen} had no room for its KV after all"
        case "delay":
            return "It had to wait for its turn"
        case "resume":
            return _resumed(decision)
        case "move":
            return _moved(decision)
        case "migration":
            return _migrates(decision)
        case "stay":
            return f"It stayed on {chosen} after all"
        case "pull":
            return "The KV of its prompt's beginning could not be pulled, so that it was computed"
    return f"{decision.kind.capitalize()}: {chosen}" if chosen else decision.kind.capitalize()


def _placed(decision: Decision, prompt_tokens: int) -> str:
    chosen, split = decision.chosen, _split(decision)
    if split == 0:
        return f"{chosen} computes it whole"
    if split is not None and 0 < split < prompt_tokens:
        other = next((str(one.figures["decode"]) for one in decision.reasons if "decode" in one.figures), "")
        return f"Prefill of {split:,.0f} of {prompt_tokens:,} tokens went to {chosen}" + (
            f", the rest to {other}" if other else ""
        )
    return f"Prefill went to {chosen}"


def _split(decision: Decision) -> float | None:
    """Prompt tokens that the prefill instance computes, if the reasons say."""
    for reason in decision.reasons:
        if reason.what.startswith((LOCAL, "local_only")) or "coupled" in reason.figures:
            return 0.0
        split = reason.figures.get("split", reason.figures.get("tokens"))
        if isinstance(split, float | int):
            return float(split)
    return None


def _resumed(decision: Decision) -> str:
    tokens = next((one.figures["tokens"] for one in decision.reasons if "tokens" in one.figures), None)
    after = f" after {count(tokens, 'token')}" if isinstance(tokens, float | int) and tokens else ""
    return f"An attempt failed{after}; another one begins"


def _moved(decision: Decision) -> str:
    figures = decision.reasons[0].figures if decision.reasons else {}
    tokens, left = figures.get("tokens"), figures.get("from", "its instance")
    to = f" for {decision.chosen}" if decision.chosen else ""
    after = f" after {count(tokens, 'token')}" if isinstance(tokens, float | int) else ""
    return f"It left {left}{to}{after}"


def _migrates(decision: Decision) -> str:
    figures = decision.reasons[0].figures if decision.reasons else {}
    return f"It began to go on at {decision.chosen} with its KV, from {figures.get('from', 'its instance')}"


def _spans(timeline: RequestTimeline) -> Iterator[Sentence]:
    comes = {(span.attempt, span.started_s) for span in timeline.spans if span.span is Span.TRANSFER}
    for span in timeline.spans:
        took_s = span.ended_s - span.started_s
        if took_s >= LEAST_S:
            for_room = span.span is Span.DECODE_QUEUE and (span.attempt, span.ended_s) in comes
            text = _told(span, took_s, _FOR_ROOM if for_room else _SPANS[span.span])
            yield Sentence(span.started_s - timeline.arrived_s, text, {"seconds": took_s}, span.span)


def _told(span: SpanRecord, took_s: float, form: str) -> str:
    text = form.format(where=span.instance_id or "the gateway", time=duration(took_s))
    return text if span.attempt < 2 else f"{text.removesuffix('.')} (attempt {span.attempt})."


def _transfers(timeline: RequestTimeline) -> Iterator[Sentence]:
    for transfer in timeline.transfers:
        if transfer.outcome is not TransferOutcome.LOCAL:
            at_s = transfer.ended_s - timeline.arrived_s if transfer.ended_s else None
            if at_s is None and timeline.first_token_s:
                at_s = timeline.first_token_s - timeline.arrived_s
            figures: dict[str, float | str] = {"tokens": transfer.tokens, "wire_bytes": transfer.wire_bytes}
            yield Sentence(at_s, _transferred(transfer), figures, Span.TRANSFER)


def _transferred(transfer: TransferReport) -> str:
    tokens, took_s = count(transfer.tokens, "token"), transfer.ended_s - transfer.started_s
    match transfer.outcome:
        case TransferOutcome.CACHED:
            return f"KV of {tokens} was there already; nothing was sent."
        case TransferOutcome.RECOMPUTED:
            why = f": {transfer.error}" if transfer.error else ""
            return f"KV of {tokens} did not come{why}. They were computed again."
    over = f" over {transfer.transport}" if transfer.transport else ""
    speed = f" in {duration(took_s)} ({size(transfer.wire_bytes / took_s)}/s)" if took_s > 0 else ""
    return f"KV of {tokens}, {size(transfer.wire_bytes)}, came{over}{speed}."
