#!/bin/sh
# The entry of a container: takes the cluster's keys, says where its peers reach it, and becomes the command.
set -eu
if [ -f /keys/curve.env ]; then
  set -a
  . /keys/curve.env
  set +a
fi
# ZeroMQ listens on addresses, not on names.
address=$(hostname -i | cut -d' ' -f1)
export POLYPHASE_WORKER_ADVERTISE_HOST="${POLYPHASE_WORKER_ADVERTISE_HOST:-$address}"
exec "$@"
