"""What a model keeps for a request, in bytes and in words."""

import msgspec

from shared.domain.instance import KvComponent, KvGeometry, KvKind

WINDOWS = KvComponent(KvKind.HEADS, (0, 2, 4), sides=2, heads=4, head_dim=64, window=127)
FULL = KvComponent(KvKind.HEADS, (1, 3, 5), sides=2, heads=8, head_dim=32)
LATENT = KvComponent(KvKind.LATENT, (6, 7), sides=1, heads=1, head_dim=576)
STATE = KvComponent(KvKind.STATE, (8,), 3, 24, 1, window=1, part="state 0.2", dtype="bfloat16")


def test_a_token_takes_what_its_components_keep_without_states() -> None:
    geometry = KvGeometry(9, 4, 64, (WINDOWS, FULL, LATENT, STATE))
    assert geometry.bytes_per_token(2.0) == 2 * (3 * 2 * 4 * 64 + 3 * 2 * 8 * 32 + 2 * 576)
    assert KvGeometry(9, 0, 0, (STATE,)).bytes_per_token(2.0) == 0.0


def test_without_components_a_token_takes_k_and_v_of_all_layers() -> None:
    assert KvGeometry(9, 4, 64).bytes_per_token(0.5) == 2 * 9 * 4 * 64 / 2


def test_a_component_in_words() -> None:
    assert str(WINDOWS) == "heads of 2 x 4 x 64 within 127 tokens in layers 0, 2, 4"
    assert str(FULL) == "heads of 2 x 8 x 32 in layers 1, 3, 5"
    assert str(LATENT) == "latent of 1 x 1 x 576 in layers 6, 7"
    assert str(STATE) == "state 0.2 of 3 x 24 x 1 bfloat16 in layers 8"


def test_components_survive_the_wire() -> None:
    geometry = KvGeometry(9, 4, 64, (WINDOWS, LATENT, STATE))
    assert msgspec.json.decode(msgspec.json.encode(geometry), type=KvGeometry) == geometry
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=KvGeometry) == geometry
    earlier = msgspec.json.encode({"layers": 9, "kv_heads": 4, "head_dim": 64})  # of a release without components
    assert msgspec.json.decode(earlier, type=KvGeometry) == KvGeometry(9, 4, 64)
