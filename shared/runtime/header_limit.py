"""A bound on what one HTTP request may send before its body: uvicorn's parser keeps all of it, however much comes."""

import json
from asyncio import Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
_SLICE = 16 << 10
_SAID = "the request's line and headers are over the limit of {} bytes"


class HeaderLimitProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol that answers 431 and hangs up once MAX_HEAD_BYTES came that are no body.

    For `uvicorn.Config(http=HeaderLimitProtocol)`. Counted are bytes, not parsed headers: one that never ends is
    gathered inside the parser. Trailers after a chunked body and empty lines between requests count alike.
    """

    transport: Transport
    _head_bytes = 0
    _refused = False

    def data_received(self, data: bytes) -> None:
        """Feed the parser in slices, so that the limit holds within one read of the socket, too."""
        for start in range(0, len(data), _SLICE):
            if self._refused:
                return
            piece = data[start : start + _SLICE]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing() or self.parser is None:
                return
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """What came was body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request begins."""
        self._head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        self._refused = True
        said = {"message": _SAID.format(MAX_HEAD_BYTES), "type": "invalid_request_error", "param": None}
        body = json.dumps({"error": {**said, "code": "headers_too_large"}}).encode()
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self.cycle is None or self.cycle.response_complete:  # else another answer is on its way: only hang up
            self.transport.write(head.encode() + body)
        self.transport.close()
