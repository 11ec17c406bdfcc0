"""Log probabilities on the wire: packed numbers, whose shape travels with them."""

import msgspec


class LogprobRows(msgspec.Struct, array_like=True, gc=False):
    """One row a token position: candidate ids, their log probabilities, and the rank of the chosen one.

    Little-endian: ids int32 and values float32 of shape [positions][candidates], ranks int32 [positions]. There may be
    no positions: the prompt of one token has none.
    """

    candidates: int
    ids: bytes
    values: bytes
    ranks: bytes


_decoder = msgspec.msgpack.Decoder(LogprobRows)


def encode_rows(rows: LogprobRows) -> bytes:
    """Rows as opaque bytes."""
    return msgspec.msgpack.encode(rows)


def decode_rows(data: bytes) -> LogprobRows:
    """Raises msgspec.MsgspecError on anything else."""
    return _decoder.decode(data)
