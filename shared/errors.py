"""The tree of errors, with stable codes and their HTTP status."""

from collections.abc import Iterator
from typing import ClassVar


class PolyphaseError(Exception):
    """Base of all errors of Polyphase.

    `code` is stable and is sent over the wire; `retriable` says that the same call may succeed elsewhere or later.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(PolyphaseError):
    """The call is invalid and will not succeed later."""

    code = "invalid_request"
    http_status = 400


class NotFound(PolyphaseError):
    """The object does not exist."""

    code = "not_found"
    http_status = 404


class Unauthorized(PolyphaseError):
    """No key, or a wrong one."""

    code = "invalid_api_key"
    http_status = 401


class TokenMissing(PolyphaseError):
    """The call needs the cluster token, and has none."""

    code = "cluster_token_missing"
    http_status = 401


class TokenWrong(PolyphaseError):
    """The token of the call is not the cluster's."""

    code = "cluster_token_wrong"
    http_status = 403


class TokenUnset(PolyphaseError):
    """The service itself has no cluster token, so that it refuses all calls that need one."""

    code = "cluster_token_unset"
    http_status = 403


class Busy(PolyphaseError):
    """A limit is reached; the same request can succeed later."""

    code = "busy"
    http_status = 429
    retriable = True


class NoRoom(Busy):
    """The decode instance has no KV memory for the job to the end of its answer, and was asked to refuse it then."""

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
    """A needed part is broken or missing."""

    code = "unavailable"
    http_status = 503
    retriable = True


class Standby(Unavailable):
    """This process is a standby: another one acts, or soon will. Nothing was done."""

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
    """A call got no answer and may have been carried out. `operation_id`: of the operation to look up."""

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
    """There was no connection, and the call was given up before it was sent."""

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
    """The request lost one instance after the other; as it may be the cause, it is not retried."""

    code = "instances_lost"
    http_status = 422


class EngineFailed(PolyphaseError):
    """The engine could not compute the job."""

    code = "engine_failed"
    http_status = 500
    retriable = True


def _tree(error: type[PolyphaseError]) -> Iterator[type[PolyphaseError]]:
    yield error
    for each in error.__subclasses__():
        yield from _tree(each)


BY_CODE: dict[str, type[PolyphaseError]] = {error.code: error for error in _tree(PolyphaseError)}


def from_code(code: str, message: str, retry_after_s: float | None = None) -> PolyphaseError:
    """The error that a peer named by its code; an unknown code is an internal error."""
    return BY_CODE.get(code, PolyphaseError)(message, retry_after_s=retry_after_s)
