"""Every reason that is written anywhere has words."""

import ast
from pathlib import Path

import pytest

from shared.domain.kv import Codec
from shared.domain.route import Affinity, Reason
from shared.explain.reasons import PHRASES, phrase
from shared.policy import registry
from shared.wire.messages import LeaveCause

ROOT = Path(__file__).parents[3]
SOURCES = sorted(file for part in ("shared/policy", "gateway", "services") for file in (ROOT / part).rglob("*.py"))

# Sites whose words are put together when they run: by file and expression, and all that they can say.
PUT_TOGETHER: dict[tuple[str, str], list[str]] = {
    ("shared/policy/dispatch.py", "what"): [
        *(f"dispatch:{name}" for name in registry.DISPATCH),
        *(f"dispatch:{name}, none has the memory: most free" for name in registry.DISPATCH),
    ],
    ("shared/policy/codec.py", "f'codec:{chosen.value}'"): [f"codec:{codec.value}" for codec in Codec],
    ("shared/policy/split.py", "f'split:{self.name}'"): ["split:full", "split:none", "split:fraction", "split:random"],
    ("shared/policy/papers/cronus.py", "f'split:{self.name}'"): ["split:cronus", "split:balanced"],
    ("shared/policy/papers/cronus.py", "f'split:{self.name}, full'"): ["split:cronus, full", "split:balanced, full"],
    ("shared/policy/papers/huawei.py", "f'placement:{self.name}'"): ["placement:workload", "placement:memory"],
    ("shared/policy/placement.py", "f'local: {why.message}'"): ["local: no prefill instance is ready (1 dead)"],
    ("shared/policy/adaptive.py", "f'session:{affinity.value}'"): [f"session:{each.value}" for each in Affinity],
    ("gateway/job.py", "prediction.source"): ["classifier", "observed"],
    ("gateway/job.py", "f'migration:{cause}'"): [f"migration:{cause.value}" for cause in LeaveCause],
}
# Words of an error go as they are: what they say changes with every case.
ERRORS = {
    ("gateway/job.py", "error.message"),
    ("gateway/pipeline.py", "error.message"),
    ("gateway/pipeline.py", "refusal.message"),
    ("gateway/mover.py", "error.message"),
    ("gateway/job.py", "error.code"),
    ("services/worker/jobs/prefill.py", "error.message"),
}


def sites() -> list[tuple[str, ast.expr]]:
    found = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reason":
                found.append((file.relative_to(ROOT).as_posix(), node.args[0]))
    return found


def test_every_reason_that_is_written_has_words() -> None:
    codes: list[str] = []
    seen: set[tuple[str, str]] = set()
    for file, argument in sites():
        if isinstance(argument, ast.Constant):
            codes.append(str(argument.value))
            continue
        site = file, ast.unparse(argument)
        seen.add(site)
        assert site in ERRORS or site in PUT_TOGETHER, f"a new kind of reason: {site}"
        codes += PUT_TOGETHER.get(site, [])
    assert seen == ERRORS | PUT_TOGETHER.keys(), "a site is gone"
    assert len(codes) > 40
    for code in codes:
        known = code in PHRASES or code.startswith("local: ") or code.endswith(", none has the memory: most free")
        assert known, f"no words for {code!r}"
        phrase(Reason(code))  # what is missing is left out


def test_every_entry_is_written_somewhere() -> None:
    codes = {argument.value for _, argument in sites() if isinstance(argument, ast.Constant)}
    codes |= {code for known in PUT_TOGETHER.values() for code in known}
    assert PHRASES.keys() <= codes


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            Reason(
                "placement:adaptive",
                {
                    "wait_s": 0.48,
                    "runner_up": "prefill-0",
                    "runner_up_wait_s": 1.18,
                    "saved_tokens": 512,
                    "ttft_s": 0.62,
                    "tpot_s": 0.031,
                },
            ),
            "0.48 s of work ahead, 0.7 s less than prefill-0; it holds 512 tokens of this prompt; "
            "first token expected after 0.62 s, then one each 31 ms",
        ),
        (Reason("placement:adaptive", {"wait_s": 0.0, "saved_tokens": 0}), "nothing ahead of it"),
        (
            Reason(
                "placement:adaptive", {"wait_s": 0.0, "saved_tokens": 2048, "host_tokens": 1408, "host_load_s": 0.012}
            ),
            "nothing ahead of it; it holds 2,048 tokens of this prompt; 1,408 tokens of it lie in its host memory: "
            "loading takes 12 ms",
        ),
        (
            Reason(
                "placement:adaptive",
                {"wait_s": 0.0, "pull_from": "d-1", "pull_tokens": 1408, "pull_s": 0.031, "compute_s": 0.2},
            ),
            "nothing ahead of it; it pulls 1,408 tokens of it from d-1 within 31 ms; to compute them would take 0.2 s",
        ),
        (
            Reason(
                "placement:adaptive",
                {"wait_s": 0.0, "no_pull_from": "d-1", "pull_tokens": 256, "pull_s": 0.5, "compute_s": 0.2},
            ),
            "nothing ahead of it; it computes 256 tokens that d-1 holds, in 0.2 s; to pull them would take 0.5 s",
        ),
        (
            Reason(
                "placement:adaptive",
                {
                    "wait_s": 0.0,
                    "no_pull_from": "d-1",
                    "pull_tokens": 256,
                    "pull_s": 0.1,
                    "compute_s": 0.2,
                    "others_pull": 0.3,
                },
            ),
            "nothing ahead of it; it computes 256 tokens that d-1 holds, in 0.2 s; to pull them would take 0.1 s "
            "and delay others there",
        ),
        (
            Reason("placement:least_load", {"chosen": "p-1", "score": 0.2, "runner_up": "p-0", "runner_up_score": 0.2}),
            "0.2 s until it would be through, as at p-0",
        ),
        (Reason("filter: ready, not excluded, context fits", {"broadcast": 4, "instances": 2}), ""),
        (
            Reason("filter: ready, not excluded, context fits", {"excluded": "p-0"}),
            "not p-0, where it has just failed or was paused",
        ),
        (Reason("local: no prefill instance is ready"), "without a prefill instance: no prefill instance is ready"),
        (Reason("split:full", {"tokens": 800, "prompt_tokens": 800}), "it computes 800 tokens of 800"),
        (
            Reason("dispatch:spread, none has the memory: most free", {"need_tokens": 900, "free_tokens": 1}),
            "nowhere is room for it at once, most is free there (1 token); 900 tokens of KV needed",
        ),
        (
            Reason("codec:int8", {"takes_s": 0.02, "raw_s": 0.05, "link_waits_s": 0.0}),
            "20 ms on the way; exact it would take 50 ms",
        ),
        (
            Reason("codec:raw", {"takes_s": 0.02, "raw_s": 0.02, "link_waits_s": 0.2}),
            "20 ms on the way; the link is busy for 0.2 s",
        ),
        (
            Reason("classifier", {"confidence": 0.83, "expected_tokens": 96.0}),
            "by the classifier, 83 % sure; 96 tokens expected",
        ),
        (Reason("peer_lost", {"error": "decode-1 is lost", "tokens": 12}), "decode-1 is lost (peer_lost)"),
        (Reason("prompts for 2.00 s wait", {"cause": "prefill"}), "prompts for 2.00 s wait"),
        (Reason("considered", {"keep": 0.2, "one more": 0.05}), "considered: keep 0.2, one more 0.05"),
        (Reason("something new", {"figure": 1.5, "name": "x"}), "something new (figure 1.5, name x)"),
    ],
    ids=lambda one: one.what if isinstance(one, Reason) else "",
)
def test_how_they_read(reason: Reason, said: str) -> None:
    assert phrase(reason) == said
