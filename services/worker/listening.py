"""What an instance hears from the monitor: policies, that it is a stranger, and the cluster while it dispatches."""

from contextlib import AsyncExitStack

from services.worker.jobs.dispatcher import REST_S, Dispatcher
from services.worker.jobs.roles import RoleState
from services.worker.policies import FollowedPolicies
from services.worker.settings import WorkerSettings
from services.worker.telemetry import Telemetry
from shared.domain.policies import PolicySet
from shared.runtime.tasks import Background
from shared.wire.broadcast import ClusterFeed
from shared.wire.sockets import Sockets


def listen(
    sockets: Sockets,
    settings: WorkerSettings,
    telemetry: Telemetry,
    policies: FollowedPolicies,
    dispatcher: Dispatcher,
    roles: RoleState,
    stack: AsyncExitStack,
    tasks: Background,
) -> None:
    """Until the stack is closed."""

    def told(said: PolicySet) -> None:
        policies.hear(said)
        telemetry.heard(said)

    feed = ClusterFeed(
        sockets,
        settings.broadcast_address,
        dispatcher.hear,
        following=False,
        instance_id=settings.instance_id,
        on_policies=told,
        on_stranger=telemetry.stranger,
        on_epoch=roles.obey,
    )
    stack.callback(feed.close)
    dispatcher.on_follow = feed.follow
    tasks.every("rest", REST_S, dispatcher.rest)
