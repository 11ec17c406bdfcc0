"""Log probabilities as plain lists on the wire: no tensor library is needed to carry them."""

import msgspec


class LogprobRows(msgspec.Struct, array_like=True, gc=False):
    """One row a token position: candidate ids, their log probabilities, and the rank of the chosen one.

    Shapes: ids and values [positions][candidates], ranks [positions].
    """

    ids: list[list[int]]
    values: list[list[float]]
    ranks: list[int]


_decoder = msgspec.msgpack.Decoder(LogprobRows)


def encode_rows(rows: LogprobRows) -> bytes:
    """Rows as opaque bytes."""
    return msgspec.msgpack.encode(rows)


def decode_rows(data: bytes) -> LogprobRows:
    """Raises msgspec.MsgspecError on anything else."""
    return _decoder.decode(data)
