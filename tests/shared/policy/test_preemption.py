from shared.policy.preemption import Rank, heaviest_first, victim

RUNNING: dict[str, Rank] = {
    "old stream": (1.0, True),
    "light stream": (0.5, True),
    "old prompt": (1.0, False),
    "young prompt": (1.0, False),
    "young stream": (1.0, True),
}


def test_who_goes_first_and_who_gives_its_blocks_up() -> None:
    left, order = list(RUNNING), []
    while left:
        order.append(victim(left, RUNNING.__getitem__))
        left.remove(order[-1])
    assert order == ["light stream", "young prompt", "old prompt", "young stream", "old stream"]
    assert heaviest_first(RUNNING, RUNNING.__getitem__) == order[::-1]
