"""What a body asks for."""

import pytest

from gateway.asked import Asked, asked_of


@pytest.mark.parametrize(
    ("body", "jobs"),
    [
        (b'{"messages": [{}, {}]}', 1),
        (b'{"prompt": "a"}', 1),
        (b'{"prompt": null, "n": null}', 1),
        (b'{"prompt": [1, 2, 3]}', 1),
        (b'{"prompt": ["a", "b"]}', 2),
        (b'{"prompt": [ [1], [2, 3], [4] ], "n": 2}', 6),
        (b'{"prompt": []}', 1),
        (b'{"prompt_embeds": ["x", "y"]}', 2),
        (b'{"n": 7.0}', 7),
        (b'{"n": "7"}', 7),
        (b'{"n": 1, "n": 7}', 7),
        (b'{"\\u006e": 7}', 7),
        (b'{"n": -3}', 1),
        (b'{"n": {}}', 1),
        (b'{"n": 1e400}', 1),
        (b"", 1),
        (b"[]", 1),
        (b"{", 1),
        (b"\xff\xfe", 1),
        (b'{"n": ' + b"[" * 5000 + b"]" * 5000 + b"}", 1),
    ],
)
def test_jobs(body: bytes, jobs: int) -> None:
    assert asked_of(body).jobs == jobs


@pytest.mark.parametrize(
    ("body", "tier"),
    [
        (b'{"service_tier": "flex", "n": 2, "prompt": ["a", "b"]}', "flex"),
        (b'{"service_tier": "flex", "n": {}}', "flex"),
        (b'{"service_tier": null}', None),
        (b'{"service_tier": 3}', 3),
        (b'{"prompt": "a"}', None),
        (b'{"service_tier": "flex"', None),
    ],
)
def test_tiers(body: bytes, tier: object) -> None:
    assert asked_of(body).tier == tier
    assert asked_of(b'{"service_tier": "flex", "n": 2, "prompt": ["a", "b"]}') == Asked(4, "flex")
