#!/bin/bash
# pool.sh install|start|stop|status: a Mooncake pool on this machine, for servers that share it.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
wheel=${SAM_POOL_WHEEL:-mooncake-transfer-engine-non-cuda==0.3.13.post1}
lib=${SAM_POOL_LIB:-$root/.cache/mooncake}
run=${SAM_POOL_RUN:-$root/.run/pool}
port=${SAM_POOL_PORT:-50051}
bytes=${SAM_POOL_BYTES:-268435456}
python=${SAM_PYTHON:-$root/.venv/bin/python}

usage() {
    cat <<'EOF'
usage: scripts/pool.sh install|start|stop|status

install  puts Mooncake beside the environment (46 MB; needs Debian's libibverbs1, also over TCP;
         as root it installs that, too)
start    a master and a store that contributes memory, so that pages outlive the servers;
         prints the environment and the flags for each server
stop     ends both; status says what runs

Listens on all interfaces, whatever address is given: run it where only friends can reach it.

environment: SAM_POOL_PORT   of the master; metrics and the store's API take the next two (50051)
             SAM_POOL_BYTES  memory that the store contributes (268435456)
             SAM_POOL_WHEEL  which Mooncake (mooncake-transfer-engine-non-cuda==0.3.13.post1)
             SAM_POOL_LIB, SAM_POOL_RUN, SAM_PYTHON   where things are
exit codes:  0 ok; 1 it failed, or status: not running; 2 wrong usage, or something is missing
EOF
}

say() { printf 'pool: %s\n' "$*" >&2; }

alive() { [ -s "$run/$1.pid" ] && kill -0 "$(cat "$run/$1.pid")" 2>/dev/null; }

install_pool() {
    if ! [ -d "$lib/mooncake" ]; then
        mkdir -p "$lib"
        "$python" -m pip install --disable-pip-version-check --no-deps --quiet \
            --target "$lib" "$wheel" >&2 || { say "installation of $wheel failed"; exit 1; }
    fi
    loads && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing libibverbs1"
        { apt-get install -y -q libibverbs1 || { apt-get update -q && apt-get install -y -q \
            libibverbs1; }; } >/dev/null 2>&1 || true
        loads && return
    fi
    PYTHONPATH=$lib "$python" -c 'import mooncake.store' >&2 || true
    say "Mooncake cannot be loaded; on Debian: apt-get install libibverbs1"
    exit 2
}

loads() { PYTHONPATH=$lib "$python" -c 'import mooncake.store' 2>/dev/null; }

spawn() {
    local name=$1
    shift
    nohup "$@" >"$run/$name.log" 2>&1 </dev/null &
    printf '%s\n' $! >"$run/$name.pid"
}

wait_for_store() {
    local tries
    for tries in $(seq 100); do
        alive master && alive store || break
        if curl -sf "http://127.0.0.1:$((port + 1))/get_all_segments" | grep -q .; then
            return 0
        fi
        sleep 0.2
    done
    say "it did not come up after $tries tries; see $run/*.log"
    tail -n 5 "$run"/*.log >&2
    stop_pool
    exit 1
}

start_pool() {
    if alive master && alive store; then
        say "runs already"
        flags
        return
    fi
    install_pool
    mkdir -p "$run"
    chmod +x "$lib/mooncake/mooncake_master"
    spawn master "$lib/mooncake/mooncake_master" --rpc_port="$port" --metrics_port=$((port + 1)) \
        --rpc_address=127.0.0.1 --metrics_host=127.0.0.1
    MOONCAKE_MASTER=127.0.0.1:$port MOONCAKE_TE_META_DATA_SERVER=P2PHANDSHAKE \
        MOONCAKE_PROTOCOL=tcp MOONCAKE_GLOBAL_SEGMENT_SIZE=$bytes \
        MOONCAKE_LOCAL_HOSTNAME=127.0.0.1 PYTHONPATH=$lib \
        spawn store "$python" -m mooncake.mooncake_store_service --port=$((port + 2))
    wait_for_store
    flags
}

stop_pool() {
    local name
    for name in store master; do
        if alive "$name"; then
            kill "$(cat "$run/$name.pid")" 2>/dev/null || true
        fi
        rm -f "$run/$name.pid"
    done
}

extra_config() {
    printf '{"master_server_address": "127.0.0.1:%s", "metadata_server": "P2PHANDSHAKE", ' "$port"
    printf '"protocol": "tcp", "global_segment_size": 0, "local_hostname": "127.0.0.1", '
    printf '"prefetch_threshold": 64}'
}

flags() {
    cat <<EOF
environment of each server:
  PYTHONPATH=$lib
flags of each server, beside its own:
  --radix-cache-backend sam --enable-hierarchical-cache --hicache-mem-layout page_first_direct
  --hicache-io-backend direct --page-size 16 --hicache-write-policy write_through
  --hicache-storage-backend mooncake --hicache-storage-prefetch-policy wait_complete
  --hicache-storage-backend-extra-config '$(extra_config)'
EOF
}

case ${1:-} in
    install) install_pool ;;
    start) start_pool ;;
    stop) stop_pool ;;
    status)
        if alive master && alive store; then
            flags
        else
            say "not running"
            exit 1
        fi
        ;;
    -h | --help) usage ;;
    *) usage >&2; exit 2 ;;
esac
