#!/bin/sh
# First start: make the cluster, its superuser and its database from POSTGRES_*. Every start: serve all addresses.
set -eu
[ -z "${POSTGRES_PASSWORD_FILE:-}" ] || POSTGRES_PASSWORD="$(cat "$POSTGRES_PASSWORD_FILE")"
: "${POSTGRES_PASSWORD:?a database without a password would be open to its whole network}"
user="${POSTGRES_USER:-postgres}"
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    password_file="$(mktemp)"
    printf '%s\n' "$POSTGRES_PASSWORD" >"$password_file"
    initdb --username="$user" --pwfile="$password_file" --auth-local=trust --auth-host=scram-sha-256 --encoding=UTF8
    rm "$password_file"
    echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
    pg_ctl --options='-c listen_addresses=' --wait start
    [ "${POSTGRES_DB:-$user}" = postgres ] || createdb --username="$user" "${POSTGRES_DB:-$user}"
    pg_ctl --wait stop
fi
exec "$@" -c listen_addresses='*'
