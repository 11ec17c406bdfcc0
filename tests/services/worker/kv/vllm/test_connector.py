"""What the connector's part in the scheduler imports of a handle."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.worker.kv import KvFault
from services.worker.kv.vllm.connector import ImportSkip, ImportStart, PolyphaseConnectorScheduler, Tail
from services.worker.kv.wire.endpoint import KvSettings
from shared.domain.kv import KvHandle

SETTINGS: dict[str, Any] = {"endpoints": ["kv://127.0.0.1:1"], "events": "ipc://x", "control_key": "k"}
PROMPT, KNOWN = 40, 20
BLOCKS: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))


class Scheduler:
    """The connector's part, with one request that imports."""

    def __init__(self, tail: Tail = Tail.ANY, known: int = KNOWN, **handle: Any) -> None:
        settings = {**SETTINGS, "instance_id": "d", "generation": 1, "fingerprint": "f"}
        self.part = PolyphaseConnectorScheduler(msgspec.convert(settings, KvSettings), 1, tail)
        given = {"tokens": PROMPT + known - 1, "dtype": "float32", "endpoints": ("kv://127.0.0.1:2",), **handle}
        self.handle = KvHandle(transfer_id="t", instance_id="p", generation=1, fingerprint="f", **given)
        self.request: Any = SimpleNamespace(
            request_id="r",
            num_prompt_tokens=PROMPT,
            num_tokens=PROMPT + known,
            kv_transfer_params={"import": msgspec.to_builtins(self.handle)},
            lora_request=None,
            cache_salt=None,
        )
        self.part.on_new_request(self.request)

    def begun(self, *computed: int) -> ImportStart | ImportSkip:
        """What follows when vLLM asks with these numbers of computed tokens, and allocates blocks after the last."""
        for tokens in computed:
            external = self.part.get_num_new_matched_tokens(self.request, tokens)
        self.part.update_state_after_alloc(self.request, BLOCKS, external)
        output: Any = SimpleNamespace(total_num_scheduled_tokens=0)
        step = self.part.build_connector_meta(output)
        (only,) = [*step.imports, *step.skips]
        return only

    def pulled(self, *computed: int) -> tuple[int, int] | str:
        """The tokens that are pulled, or the fault."""
        begun = self.begun(*computed)
        return (begun.start, begun.end) if isinstance(begun, ImportStart) else begun.error


@pytest.mark.parametrize("tail", list(Tail))
def test_a_request_that_resumes_imports_its_answer_so_far(tail: Tail) -> None:
    """All but the last known token, which is computed here."""
    assert Scheduler(tail).pulled(0) == (0, PROMPT + KNOWN - 1)
    assert Scheduler(tail).pulled(48) == (48, PROMPT + KNOWN - 1)


def test_what_the_importer_computes_again_is_not_imported() -> None:
    everything = PROMPT + KNOWN
    assert Scheduler(tokens=everything).pulled(0) == (0, everything)
    assert Scheduler(Tail.WINDOW, tokens=everything).pulled(0) == (0, everything - 1)
    assert Scheduler(Tail.STATE, tokens=everything).pulled(0) == KvFault.INVALID.value


def test_an_answer_that_is_generated_again_imports_its_prompt_alone() -> None:
    assert Scheduler(known=0, tokens=PROMPT + KNOWN - 1).pulled(0) == (0, PROMPT)


def test_the_rest_of_a_request_is_imported_where_the_prefix_cache_has_its_beginning() -> None:
    assert Scheduler(start=32).pulled(32) == (32, PROMPT + KNOWN - 1)
    assert Scheduler(start=32).pulled(48) == (48, PROMPT + KNOWN - 1)
    assert Scheduler(start=32).pulled(16, 32) == (32, PROMPT + KNOWN - 1), "evicted at first, and found later"
    assert Scheduler(start=32).pulled(64) == ""  # all is cached


def test_a_gap_before_the_handle_is_computed_and_with_it_what_follows() -> None:
    assert Scheduler(start=32).pulled(16) == KvFault.GAP.value
    assert Scheduler(start=32).pulled(48, 16) == KvFault.GAP.value


@pytest.mark.parametrize("start", [-1, PROMPT + KNOWN - 1, 100])
def test_a_handle_of_nothing_is_refused(start: int) -> None:
    assert Scheduler(start=start).pulled(0) == KvFault.INVALID.value
