"""The reasons of policies, gateways and workers as phrases."""

from collections.abc import Callable, Mapping, Sequence
from string import Formatter

from shared.domain.route import Reason
from shared.domain.verdict import count, duration

Figures = Mapping[str, float | str]
Clauses = tuple[str, ...]  # each is used if all figures that it names exist

_NEED = "{need_tokens:tokens} of KV needed"
_PROMPT = "it computes {tokens:tokens} of {prompt_tokens}"

PHRASES: dict[str, Clauses | Callable[[Figures], str]] = {
    "filter: ready, not excluded, context fits": ("not {excluded}, where it has just failed or was paused",),
    "local_only: one instance must compute it whole": ("one instance must compute it whole",),
    "old loads: the monitor is silent": ("by loads that were {broadcast_age_s:s} old: the monitor is silent",),
    "placement:adaptive": lambda figures: _adaptive(figures),
    "placement:least_load": lambda figures: _least_load(figures),
    "placement:round_robin": ("it was its turn",),
    "placement:weighted": ("it was its turn, by a weight of {weight}",),
    "placement:single": ("all requests go there",),
    "placement:memory": ("memory in use there and for this: {memory_share:%}", "queued before it: {queued}"),
    "placement:workload": ("work queued before it: {queued}", "its own: {workload}", "memory: {memory_share:%}"),
    "placement:plan": ("a route of the plan, with a share of {share}; decode on {decode}",),
    "placement:plan, none of its routes can take the job": ("none of the plan's routes could take it",),
    "session:back": ("its session's last turn was computed by {last}: it goes back to {back}",),
    "session:elsewhere": ("its session's last turn was computed by {last}: elsewhere costs less now",),
    "session:impossible": ("its session's last turn was computed by {last}, which cannot take it now",),
    "split:full": (_PROMPT,),
    "split:none": ("the decode instance computes all of it",),
    "split:fraction": (_PROMPT,),
    "split:random": (f"{_PROMPT}, drawn at random",),
    "split:adaptive": (f"{_PROMPT}, which has the least SLO cost", "first token expected after {ttft_s:s}"),
    "split:cronus": (_PROMPT, "{prefill_s:s} there and {chunked_s:s} for the rest"),
    "split:cronus, full": ("it computes all {prompt_tokens:tokens}: {why}",),
    "split:balanced": (_PROMPT, "{prefill_s:s} there and {chunked_s:s} for the rest, each behind its queue"),
    "split:balanced, full": ("it computes all {prompt_tokens:tokens}: {why}",),
    "dispatch:adaptive": ("the least SLO cost there", "a token is expected each {tpot_s:s}"),
    "dispatch:random": ("drawn at random",),
    "dispatch:power_of_two": (
        "of two drawn at random the one with fewer long answers to short ones ({ratio})",
        "{runner_up} had {runner_up_ratio}",
        _NEED,
    ),
    "dispatch:spread": ("of two drawn at random the one with fewer decodes: {decodes}, {heavy_decodes} of them long",),
    "dispatch:worst_case": ("long answers go to one instance until it is full", _NEED),
    "codec:raw": lambda figures: _codec(figures),
    "codec:int8": lambda figures: _codec(figures),
    "codec:int4": lambda figures: _codec(figures),
    "codec:fp8": lambda figures: _codec(figures),
    "role_flip:idle": (
        "it was idle for {idle_s:s} (load {load_share:%}), while the other role had a load of up to "
        "{highest_load_of_other_role:%}",
    ),
    "role_flip:predictive": (
        "predicted share of requests that miss a target: {harm:%} now, {harm_then:%} then",
        "TTFT {ttft_s:s} now, {ttft_then_s:s} then",
        "TPOT {tpot_s:s} now, {tpot_then_s:s} then",
    ),
    "demand": ("asked for: {rate_per_s} requests a second of {prompt_tokens:tokens}, answers of {output_tokens}",),
    "shift": ("{what} went from {before} to {after}, noticed after {noticed_after_s:s}",),
    "considered": lambda figures: "considered: "
    + ", ".join(f"{name} {_plain(value)}" for name, value in figures.items()),
    "classifier": ("by the classifier, {confidence:%} sure", "{expected_tokens:tokens} expected"),
    "paused": (
        "its KV memory there was taken back for other requests; it was expected to stay paused for {pause_s:s}",
        "it had been so for {waited_s:s}",
    ),
    "migration": ("a token is expected each {tpot_s:s} there", "one takes {here_s:s} where it is"),
    "the holder has dropped it": ("{holder} no longer held it",),
    "migration:drain": ("it drained",),
    "migration:memory": ("its KV memory would not have held all answers to their ends",),
    "migration:tpot": ("its steps took longer than the target for a token",),
    "migration:kept": ("it decodes the beginning of answers only, between prompts",),
    "migration:operator": ("an operator asked for it",),
    "sooner": ("its next token is expected in {elsewhere_s:s}, and in {pause_s:s} where it is paused",),
    "mixed precision": lambda figures: ", ".join(f"{part}: {precision}" for part, precision in figures.items()),
    "observed": ("by answers seen before", "{expected_tokens:tokens} expected"),
}
LOCAL = "local: "  # the prefix of the reason for which there is no prefill instance
_NO_MEMORY = ", none has the memory: most free"
_HELD = ("nowhere is room for it at once, most is free there ({free_tokens:tokens})", _NEED)


def phrase(reason: Reason) -> str:
    """A reason as a phrase, empty where it adds nothing; an unknown reason in its own words, with its figures."""
    what, figures = reason.what, reason.figures
    if what.startswith(LOCAL):
        return f"without a prefill instance: {what.removeprefix(LOCAL)}"
    if what.startswith("dispatch:") and what.endswith(_NO_MEMORY):
        return _said(_HELD, figures) or "nowhere is room for it at once, most is free there"
    known = PHRASES.get(what)
    if known is None:
        return _as_it_is(what, figures)
    return known(figures) if callable(known) else _said(known, figures)


def _as_it_is(what: str, figures: Figures) -> str:
    if "error" in figures:  # `what` is its code
        return f"{figures['error']} ({what})"
    if figures.keys() <= {"code", "cause"}:  # an error's own words
        return what
    told = ", ".join(f"{name} {_plain(value)}" for name, value in figures.items())
    return f"{what} ({told})" if told else what


def _said(clauses: Sequence[str], figures: Figures) -> str:
    return "; ".join(said for clause in clauses if (said := _filled(clause, figures)))


def _filled(clause: str, figures: Figures) -> str:
    """A clause with its figures; empty when one is missing."""
    parts: list[str] = []
    for text, name, how, _ in Formatter().parse(clause):
        parts.append(text)
        if name is not None:
            value = figures.get(name)
            if value is None:
                return ""
            parts.append(_figure(value, how or ""))
    return "".join(parts)


def _figure(value: float | str, how: str) -> str:
    if isinstance(value, str):
        return value
    match how:
        case "s":
            return duration(value)
        case "tokens":
            return count(value, "token")
        case "%":
            return f"{100 * value:.3g} %"
    return _plain(value)


def _plain(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == round(value) else f"{value:.3g}"


def _adaptive(figures: Figures) -> str:
    said = [_ahead(figures, "wait_s", "runner_up_wait_s", "of work ahead", "nothing ahead of it")]
    said += [_filled("it holds {saved_tokens:tokens} of this prompt", figures)] if figures.get("saved_tokens") else []
    said += [_filled("{host_tokens:tokens} of it lie in its host memory: loading takes {host_load_s:s}", figures)]
    said += [_pulled(figures)]
    said += [_filled("it keeps the answer, at most {keep_tokens:tokens} of it", figures)]
    said += [_filled("first token expected after {ttft_s:s}, then one each {tpot_s:s}", figures)]
    return "; ".join(one for one in said if one)


def _pulled(figures: Figures) -> str:
    """How the prefix that another instance holds comes about, and how long the other way would take."""
    others = " and delay others there" if figures.get("others_pull") else ""
    return _said(
        (
            "it pulls {pull_tokens:tokens} of it from {pull_from} within {pull_s:s}; to compute them would take "
            "{compute_s:s}",
            "it computes {pull_tokens:tokens} that {no_pull_from} holds, in {compute_s:s}; to pull them would take "
            "{pull_s:s}" + others,
        ),
        figures,
    )


def _least_load(figures: Figures) -> str:
    return _ahead(figures, "score", "runner_up_score", "until it would be through", "it would begin at once")


def _ahead(figures: Figures, own: str, other: str, words: str, none: str) -> str:
    """A time, and its difference to the runner-up's."""
    own_s, other_s, name = figures.get(own), figures.get(other), figures.get("runner_up")
    if not isinstance(own_s, float | int):
        return ""
    said = f"{duration(own_s)} {words}" if own_s > 0 else none
    if not isinstance(other_s, float | int) or name is None:
        return said
    less_s = other_s - own_s
    if abs(less_s) < 0.001:
        return f"{said}, as at {name}"
    return f"{said}, {duration(abs(less_s))} {'less' if less_s > 0 else 'more'} than {name}"


def _codec(figures: Figures) -> str:
    """The duration of a KV transfer, and why its codec was chosen."""
    clauses = ["{takes_s:s} on the way"]
    if figures.get("takes_s") != figures.get("raw_s"):
        clauses.append("exact it would take {raw_s:s}")
    if figures.get("link_waits_s"):
        clauses.append("the link is busy for {link_waits_s:s}")
    return _said(clauses, figures)
