"""Small random models that see or hear, with tokenizer, chat template and processor; and pictures and sounds for them.

Benches and tests make them for themselves: nothing is downloaded. vLLM's code for models that see needs torchvision,
and soundfile to read sounds.
"""

import base64
import io
import json
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
# The whole words of a tokenizer whose other tokens are bytes.
_QWEN_WORDS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_GEMMA_WORDS = (
    *("<pad>", "<eos>", "<bos>", "<unk>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>", "<end_of_turn>"),
)
_AUDIO_WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
)
_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n" + _PARTS + "{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_AUDIO_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n" + _PARTS + "{% else %}<|audio_bos|><|AUDIO|>"
    "<|audio_eos|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    "assistant\n{% endif %}"
)
_GEMMA_TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>{{ message['role'] }}\n" + _PARTS + "{% else %}<start_of_image>"
    "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n"
    "{% endif %}"
)


@dataclass(frozen=True, slots=True)
class MediaModel:
    """model_type: transformers' name. processor, preprocessor: the files of its processor. words: of its tokenizer, and
    names for some of them. renamed: parts of weights' names as they are in published checkpoints, by transformers'.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    words: tuple[str, ...]
    named_words: Mapping[str, str]
    chat_template: str
    renamed: Mapping[str, str] = field(default_factory=dict)

    def make(self, folder: Path, seed: int = 0) -> Path:
        """Write the model with random weights into `folder`."""
        from transformers import AutoConfig, AutoModelForMultimodalLM, set_seed
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        set_seed(seed)
        config = AutoConfig.for_model(self.model_type, **self.config)
        model = AutoModelForMultimodalLM.from_config(config).float()
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # a projection of images that begins as zeros
                weight.data.normal_(std=0.1)
        model.save_pretrained(folder)
        _rename_weights(folder / "model.safetensors", self.renamed)
        _save_tokenizer(self, folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.preprocessor))
        (folder / "processor_config.json").write_text(json.dumps(self.processor))
        return folder


def _rename_weights(file: Path, renamed: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    for old, new in renamed.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    save_file(weights, file, {"format": "pt"})


def _save_tokenizer(model: MediaModel, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    newlines = ("\n" * count for count in range(1, 5))  # vLLM looks them up for Gemma-3; no text has them here
    vocabulary = {text: number for number, text in enumerate((*model.words, *characters, *newlines))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(model.words))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **model.named_words)
    fast.chat_template = model.chat_template
    fast.save_pretrained(folder)


QWEN = MediaModel(
    "Qwen2.5-VL",
    "qwen2_5_vl",
    {
        "text_config": _TEXT
        | {
            "model_type": "qwen2_5_vl_text",
            "bos_token_id": 0,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": _TEXT["hidden_size"],
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "tie_word_embeddings": False,
    },
    {"processor_class": "Qwen2_5_VLProcessor"},
    {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 64,  # 64 tokens
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    _QWEN_WORDS,
    {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
    },
    _QWEN_TEMPLATE,
)
GEMMA = MediaModel(
    "Gemma-3",
    "gemma3",
    {
        "text_config": _TEXT
        | {
            "head_dim": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "query_pre_attn_scalar": 32,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 112,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 16,
        "boi_token_index": 4,
        "eoi_token_index": 5,
        "image_token_index": 6,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    },
    {"processor_class": "Gemma3Processor", "image_seq_length": 16},
    {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": 112, "width": 112},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_seq_length": 16,
    },
    _GEMMA_WORDS,
    {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    _GEMMA_TEMPLATE,
    renamed={"vision_tower.": "vision_tower.vision_model."},
)
QWEN_AUDIO = MediaModel(
    "Qwen2-Audio",
    "qwen2_audio",
    {
        "text_config": _TEXT | {"model_type": "qwen2", "bos_token_id": 0, "eos_token_id": 2},
        "audio_config": {
            "num_mel_bins": 80,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "init_std": 0.1,
        },
        "audio_token_index": 5,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    },
    {"processor_class": "Qwen2AudioProcessor"},
    {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": 80,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
    },
    _AUDIO_WORDS,
    {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    _AUDIO_TEMPLATE,
    renamed={"language_model.model.model.": "language_model.model."},
)
MODELS = (QWEN, GEMMA, QWEN_AUDIO)


def picture(seed: int, width: int = 120, height: int = 90) -> str:
    """A PNG of coloured fields as a data: URL. The seed decides the colours."""
    return f"data:image/png;base64,{_drawn(seed, width, height, 'PNG')}"


def film(seed: int, frames: int = 4, width: int = 120, height: int = 90) -> str:
    """A video of such pictures as a data: URL of JPEGs, which vLLM accepts."""
    return "data:video/jpeg;base64," + ",".join(
        _drawn(seed * 100 + number, width, height, "JPEG") for number in range(frames)
    )


def sound(seed: int, tenths: int = 10) -> str:
    """A WAV of so many tenths of a second, each a tone, as a data: URL. The seed decides the tones."""
    import numpy as np

    tones, at = np.random.default_rng(seed).uniform(200, 4000, tenths), np.arange(1_600) / 16_000
    samples = np.concatenate([np.sin(2 * np.pi * tone * at) for tone in tones])
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples * 20_000).astype("<i2").tobytes())
    return f"data:audio/wav;base64,{base64.b64encode(data.getvalue()).decode()}"


def _drawn(seed: int, width: int, height: int, form: str) -> str:
    import numpy as np
    from PIL import Image

    fields = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(fields).resize((width, height), Image.Resampling.NEAREST).save(data, form)
    return base64.b64encode(data.getvalue()).decode()


_URLS: dict[str, tuple[str, ...]] = {
    "video_url": ("data:video",),
    "audio_url": ("data:audio",),
    "image_url": ("data:image", "http", "file:"),
}


def chat(*parts: str) -> list[dict[str, Any]]:
    """Messages of one turn: text, and images, videos and sounds by their URLs."""
    return [{"role": "user", "content": [_part(part) for part in parts]}]


def _part(part: str) -> dict[str, Any]:
    for kind, beginnings in _URLS.items():
        if part.startswith(beginnings):
            return {"type": kind, kind: {"url": part}}
    return {"type": "text", "text": part}
