"""ThunderServe: KV on the wire, 4 bits against 16 (Table 8, section 4). Only step and transfer models are needed."""

from lab.papers.rows import Row, between, told, value
from lab.papers.testbed import Testbed
from shared.cost.transfer import Link, transfer_time_s
from shared.domain.kv import Codec

NETWORK = Link(5e9)  # 40 Gb/s
CODING_OUTPUT = 13  # median output tokens of coding (Appendix E)
PROMPTS = (512, 1024, 2048)


def kv_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Transfer times of one prompt, and their share of a request's time.

    The two times are what the link's efficiency was taken from (`Link`: 0.56 and 0.61 of nominal, 0.58), so that
    nothing is asked of them; their ratio and the shares do not follow from it alone.
    """
    model = testbed.geometry("LLaMA-30B")
    raw, packed = (1e3 * transfer_time_s(model, 1024, NETWORK, codec) for codec in (Codec.RAW, Codec.INT4))
    rows = [
        told("kv_16bit", "Table 8", "KV of 1024 tokens, LLaMA-30B, 40 Gb/s, 16 bits (fitted)", "ms", "584", raw),
        told("kv_4bit", "Table 8", "the same, 4 bits, ours 4.75 (fitted)", "ms", "133", packed),
        value("kv_ratio", "Table 8", "16 bits over 4 bits", "x", 584.0 / 133.0, raw / packed),
    ]
    for codec, low, high in ((Codec.RAW, 16.0, 30.0), (Codec.INT4, 4.0, 9.0)):
        shares = [kv_share(testbed, prompt, codec) for prompt in PROMPTS]
        name = "16 bits" if codec is Codec.RAW else "4 bits"
        what = f"KV's share of a request, LLaMA-7B, 2 A5000, {name}, mean of prompts 512–2048"
        rows.append(between(f"share_{codec.value}", "4", what, "%", low, high, sum(shares) / len(shares)))
        shown = f"{low:g}–{high:g}"
        rows += [
            told(f"share_{codec.value}_{at}", "4", f"… prompt of {prompt}, {name}", "%", shown, share)
            for at, (prompt, share) in enumerate(zip(PROMPTS, shares, strict=True))
        ]
    return tuple(rows)


def kv_share(testbed: Testbed, prompt: int, codec: Codec) -> float:
    """Percent of prefill, transfer and decode that the transfer takes, for a request that runs alone."""
    model = testbed.model("RTX-A5000", "Llama-2-7B")
    prefill = model.prefill_time_s(prompt)
    transfer = transfer_time_s(model.geometry, prompt, NETWORK, codec)
    decode = sum(model.decode_time_s(1, prompt + at) for at in range(CODING_OUTPUT - 1))
    return 100.0 * transfer / (prefill + transfer + decode)
