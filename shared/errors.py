"""One tree of errors, with stable codes, and the one table that maps them to HTTP."""

from typing import ClassVar


class PolyphaseError(Exception):
    """Base of all errors that we raise on purpose.

    `code` is stable and travels over the wire; `retriable` says that the same call may succeed elsewhere or later.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(PolyphaseError):
    """The caller sent something that can never work."""

    code = "invalid_request"
    http_status = 400


class NotFound(PolyphaseError):
    """No such thing."""

    code = "not_found"
    http_status = 404


class Unauthorized(PolyphaseError):
    """No key, or a wrong one."""

    code = "invalid_api_key"
    http_status = 401


class TokenMissing(PolyphaseError):
    """What changes something needs the cluster's secret, and none was shown."""

    code = "cluster_token_missing"
    http_status = 401


class TokenWrong(PolyphaseError):
    """The secret that was shown is not the cluster's."""

    code = "cluster_token_wrong"
    http_status = 403


class TokenUnset(PolyphaseError):
    """The service itself was given no secret of a cluster: nobody can show it the right one."""

    code = "cluster_token_unset"
    http_status = 403


class Busy(PolyphaseError):
    """A limit is reached; the same request can succeed later."""

    code = "busy"
    http_status = 429
    retriable = True


class NoRoom(Busy):
    """The decode instance has no KV memory free for the job to the end of its answer, and was to say so."""

    code = "no_room"


class Overloaded(PolyphaseError):
    """The cluster is too full for the job to meet its targets; `cause` names what is full."""

    code = "overloaded"
    http_status = 429

    def __init__(self, message: str, *, cause: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.cause = cause


class Delayed(Overloaded):
    """The job would be in the way of heavier classes: ask again after `retry_after_s`."""

    code = "delayed"


class Stays(PolyphaseError):
    """A paused job goes on soonest where it is: nothing was placed."""

    code = "stays"
    http_status = 409


class Unavailable(PolyphaseError):
    """Something needed is broken or missing."""

    code = "unavailable"
    http_status = 503
    retriable = True


class Standby(Unavailable):
    """This one only stands by: another one acts at present, or soon will. Nothing was done."""

    code = "standby"


class Conflict(PolyphaseError):
    """The state of the target does not allow it."""

    code = "conflict"
    http_status = 409


class Incompatible(PolyphaseError):
    """An instance does not fit the cluster (model, engine, KV geometry)."""

    code = "incompatible"
    http_status = 409


class DeadlineExceeded(PolyphaseError):
    """The job's or the call's time ran out."""

    code = "deadline_exceeded"
    http_status = 504


class OutcomeUnknown(PolyphaseError):
    """It was asked for and no answer came: it may have been carried out, or not. `operation_id`: what to ask for."""

    code = "outcome_unknown"
    http_status = 504

    def __init__(self, message: str, *, operation_id: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.operation_id = operation_id


class PeerLost(PolyphaseError):
    """The connection to the other side broke while a call was under way."""

    code = "peer_lost"
    http_status = 503
    retriable = True


class NotConnected(PeerLost):
    """There was no connection for so long that the call was given up before it was sent: nobody has seen it."""

    code = "not_connected"


class WireVersionMismatch(NotConnected):
    """The peer has an incompatible wire version: nothing of the call was carried out. The message names both."""

    code = "wire_version_mismatch"


class WrongRole(PolyphaseError):
    """The instance is draining or has another role by now; place the job again."""

    code = "wrong_role"
    http_status = 409
    retriable = True


class InstancesLost(PolyphaseError):
    """The request lost one instance after the other; it may be what ends them, so it is not tried again."""

    code = "instances_lost"
    http_status = 422


class EngineFailed(PolyphaseError):
    """The engine could not compute the job."""

    code = "engine_failed"
    http_status = 500
    retriable = True


_ALL: tuple[type[PolyphaseError], ...] = (
    PolyphaseError,
    InvalidRequest,
    NotFound,
    Unauthorized,
    TokenMissing,
    TokenWrong,
    TokenUnset,
    Busy,
    NoRoom,
    Overloaded,
    Delayed,
    Stays,
    Unavailable,
    Standby,
    Conflict,
    Incompatible,
    DeadlineExceeded,
    OutcomeUnknown,
    PeerLost,
    NotConnected,
    WireVersionMismatch,
    WrongRole,
    InstancesLost,
    EngineFailed,
)
BY_CODE: dict[str, type[PolyphaseError]] = {error.code: error for error in _ALL}


def from_code(code: str, message: str, retry_after_s: float | None = None) -> PolyphaseError:
    """The error that a peer named by its code; an unknown code is an internal error."""
    return BY_CODE.get(code, PolyphaseError)(message, retry_after_s=retry_after_s)
