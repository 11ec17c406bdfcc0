"""Files in safetensors' format."""

import json


def safetensors(data_bytes: int, name: str = "w") -> bytes:
    """A file with one tensor of so many bytes, which is a multiple of 2."""
    tensor = {"dtype": "BF16", "shape": [data_bytes // 2], "data_offsets": [0, data_bytes]}
    header = json.dumps({name: tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(data_bytes)
