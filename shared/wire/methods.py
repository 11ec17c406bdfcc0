"""Every method of the RPC and its types, in one place."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.domain.job import LengthPrediction
from shared.domain.prefix import PrefixDelta
from shared.domain.route import Route
from shared.wire import messages as m

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply, Item]):
    """A method: what is asked, what is answered, and what may come in between."""

    name: str
    request: type[Request]
    reply: type[Reply]
    item: type[Item]


_Nothing = type(None)

# Global scheduler.
PLACE = Method("place", m.PlaceRequest, Route, _Nothing)
REPORT = Method("report", m.JobReports, _Nothing, _Nothing)

# Predictor.
PREDICT = Method("predict", m.PredictRequest, LengthPrediction, _Nothing)

# Worker, as a prefill instance.
PREFILL = Method("prefill", m.PrefillRequest, m.PrefillReply, m.PrefillStarted)
PREDICTED = Method("predicted", m.Predicted, _Nothing, _Nothing)
RELEASE = Method("release", m.ReleaseRequest, _Nothing, _Nothing)

# Worker, as a decode instance.
EXPECT = Method("expect", m.ExpectRequest, _Nothing, _Nothing)
PREFETCH = Method("prefetch", m.PrefetchRequest, _Nothing, _Nothing)
DECODE = Method("decode", m.DecodeRequest, m.DecodeReply, m.TokenStep)

# Worker, by the global schedulers.
PREFIXES = Method("prefixes", m.PrefixesRequest, _Nothing, PrefixDelta)

# Worker, by the cluster monitor.
DRAIN = Method("drain", m.DrainRequest, m.DrainReply, _Nothing)
RESUME = Method("resume", m.ResumeRequest, _Nothing, _Nothing)
FLIP = Method("flip", m.FlipRequest, m.FlipReply, _Nothing)
