"""How the KV of a job leaves this instance: chosen once its decode instance is known, from what is known of both."""

from collections.abc import Callable

from services.worker.jobs.dispatcher import Dispatcher
from shared.domain.instance import InstanceInfo
from shared.domain.kv import Codec
from shared.policy.codec import CodecChoice, choose_codec
from shared.wire.messages import PrefillRequest


class Codecs:
    """The thin driver of `choose_codec`. `own`: this instance, with its rates as they are. `loaded`: whether its lossy
    codecs are. The first use of one that is not would hold the transfer threads up for longer than peers wait.
    """

    def __init__(self, own: Callable[[], InstanceInfo], dispatcher: Dispatcher, loaded: bool) -> None:
        self._own = own
        self._dispatcher = dispatcher
        self._loaded = loaded

    def choose(self, request: PrefillRequest, decode_id: str, left_tokens: int) -> CodecChoice:
        """The codec of the request's KV for that instance; `left_tokens` of its prompt are still to be computed.

        The one that the gateway's setting fixes for all, if it does; raw where the instance is not known here, and
        where this one has no codecs loaded.
        """
        if not self._loaded:
            return CodecChoice(Codec.RAW, 0.0)
        if request.codec.lossy or not request.job.slo.lossy_kv.lossy:
            return CodecChoice(request.codec, 0.0)
        receiver = self._dispatcher.known(decode_id)
        if receiver is None:
            return CodecChoice(Codec.RAW, 0.0)
        return choose_codec(request.job, request.prompt_tokens, left_tokens, self._own(), receiver)
