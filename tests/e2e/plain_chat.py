"""Plain vLLM, without any part of ours: the token ids that a model answers to chats, as JSON.

`python -m tests.e2e.plain_chat MODEL CHATS TOKENS`, where CHATS is a JSON file with lists of messages.
"""

import json
import os
import sys
from pathlib import Path


def main(model: str, chats: str, tokens: str) -> None:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_MEDIA_CONNECTOR="http",  # a gateway in the parent process has set its own
    )
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", max_model_len=1280, enforce_eager=True, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=int(tokens), ignore_eos=True)
    answers = llm.chat(json.loads(Path(chats).read_text()), params, use_tqdm=False)
    print(json.dumps([[answer.prompt_token_ids, list(answer.outputs[0].token_ids)] for answer in answers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
