"""The troubles that `polyphase bench troubles` stages, in this order, each from outside and by a real means."""

from lab.bench import troubles_making as making
from lab.bench.troubles_beds import LATE, REAL
from lab.bench.troubles_stage import Trouble
from lab.chaos.arena import Arena
from shared.domain.verdict import Level


def _prefill(arena: Arena) -> tuple[str, ...]:
    return arena.prefill


MISSING = Trouble(
    "missing",
    "nobody starts an instance of the cluster file",
    "instances_missing",
    rf"1 of \d decode instances never came: {LATE}",
    making.missing,
    culprits=lambda _: (LATE,),
)
TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        "dead",
        "SIGKILL of a decode instance, and of each that the launcher starts in its place",
        "instances_dead",
        r"1 of \d decode instances dead: decode-0",
        making.dead,
        culprits=lambda _: ("decode-0",),
    ),
    MISSING,
    Trouble(
        "unresponsive",
        "a proxy drops all heartbeats of a prefill instance",
        "instances_unresponsive",
        r"1 of 2 prefill instances unresponsive: prefill-0",
        making.unresponsive,
        culprits=lambda _: ("prefill-0",),
    ),
    Trouble(
        "frozen",
        "SIGSTOP of a prefill instance, which is counted as dead when its connections are silent for 2 s",
        "instances_dead",
        r"1 of 2 prefill instances dead: prefill-0",
        making.frozen,
        culprits=lambda _: ("prefill-0",),
    ),
    Trouble(
        "burst",
        "160 requests at once, where each of two gateways takes 40 that do not decode yet",
        "refusals",
        r"more at once than the gateway or a key may have \(\d+ busy\)",
        making.burst,
    ),
    Trouble(
        "too-long",
        "12 answers of 16 s, where a request may take 10 s",
        "errors",
        r"they took longer than they may \(\d+ deadline_exceeded\)",
        making.too_long,
    ),
    Trouble(
        "ttft",
        "3 clients of a class whose first token is to come within 30 ms, which no prompt of 300 tokens can",
        "ttft_missed",
        r"target 30 ms, class instant\): (prompts take long to compute|requests wait for prefill)",
        making.instant,
    ),
    Trouble(
        "tpot",
        "3 clients of a class that wants a token every 20 ms, of instances whose steps take 40 ms",
        "tpot_missed",
        r"target 20 ms, class swift\): decode steps are slow",
        making.swift,
    ),
    Trouble(
        "overload",
        "24 clients with prompts of 900 tokens, each asking again at once",
        "ttft_missed",
        r"requests wait for prefill \(queue: .*; \d+ prompts? waits? for up to .* \(prefill-0, prefill-1\)",
        making.overload,
        culprits=_prefill,
    ),
    Trouble(
        "kv-full",
        "44 clients whose answers need more KV than the decode instances have",
        "kv_full",
        r"decode KV \S+ %.*, \d+ waiting: decode-",
        making.full,
    ),
    Trouble(
        "all-dead",
        "SIGKILL of all decode instances, and of each that the launcher starts in their place",
        "role_empty",
        r"no decode instance is ready: \d dead",
        making.all_dead,
        level=Level.DOWN,
    ),
    Trouble(
        "gateway", "SIGSTOP of a gateway", "gateway_gone", "1 of 2 gateways silent .*: gateway-1", making.silent_gateway
    ),
    Trouble(
        "scheduler",
        "SIGSTOP of a scheduler",
        "scheduler_gone",
        "1 of 2 schedulers silent .*: scheduler-1",
        making.silent_scheduler,
    ),
    Trouble(
        "policies",
        "a policy is changed while a proxy drops all broadcasts to an instance",
        "policies_not_followed",
        "policies not followed by decode-0: they go by older ones",
        making.deaf,
        culprits=lambda _: ("decode-0",),
    ),
    Trouble(
        "predictor",
        "SIGKILL of the predictor, and of each that the launcher starts in its place",
        "predictor_fallback",
        "output lengths not predicted: no predictor answers",
        making.no_predictor,
    ),
    Trouble(
        "kv-cut",
        "a proxy resets every KV connection",
        "transfers_failing",
        r"(cannot be reached for KV|KV connections break) \(\d+ \w+\); decode instances compute these prompts again",
        making.kv_cut,
        bed=REAL,
    ),
    Trouble(
        "kv-slow",
        f"a proxy has every KV message take {making.SLOW_S / 2:g} s longer",
        "transfers_slow",
        r"half of the KV transfers take over .*: \S+ [kM]?B each on average, at \S+ [kM]?B/s",
        making.kv_slow,
        bed=REAL,
    ),
)
