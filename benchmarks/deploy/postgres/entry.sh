#!/bin/sh
# As the official image's: makes the database at the first start, for POSTGRES_USER; as root or as postgres (999).
set -eu
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
if [ "$(id -u)" = 0 ]; then
  if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then
    POSTGRES_PASSWORD=$(cat "$POSTGRES_PASSWORD_FILE")
    export POSTGRES_PASSWORD
  fi
  mkdir -p "$PGDATA"
  chown -R postgres:postgres "$(dirname "$PGDATA")"
  exec setpriv --reuid postgres --regid postgres --init-groups sh "$0"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  umask 077
  printf %s "$POSTGRES_PASSWORD" >/tmp/password
  initdb -D "$PGDATA" -U "$POSTGRES_USER" --auth-local=trust --auth-host=scram-sha-256 --pwfile=/tmp/password
  rm /tmp/password
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  echo "create database \"${POSTGRES_DB:-$POSTGRES_USER}\"" | postgres --single -D "$PGDATA" postgres
fi
unset POSTGRES_PASSWORD
exec postgres -D "$PGDATA" -c 'listen_addresses=*'
