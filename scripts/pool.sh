#!/bin/bash
# pool.sh install|start|stop|status|router: a Mooncake pool on this machine; see --help.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
wheel=${SAM_POOL_WHEEL:-mooncake-transfer-engine-non-cuda==0.3.13.post1}
router_wheel=${SAM_ROUTER_WHEEL:-smg==1.13.0}
lib=${SAM_POOL_LIB:-$root/.cache/mooncake}
router_lib=${SAM_ROUTER_LIB:-$root/.cache/router}
run=${SAM_POOL_RUN:-$root/.run/pool}
python=${SAM_PYTHON:-${SAM_VENV:-$root/.venv}/bin/python}
min_bytes=16777216

usage() {
    cat <<'EOF'
usage: scripts/pool.sh install|start|stop|status|router

install  puts Mooncake beside the environment (46 MB; needs Debian's libibverbs1, also over TCP;
         as root it installs that, too); nothing to do, in a second, when it is there
start    a master, and a store that contributes memory, so that pages outlive the servers;
         prints the environment and the flags for each server. Brings back what died
stop     ends both; their pages are gone
status   what runs; with its flags if all does
router   puts two routers in: smg from PyPI (37 MB) and Debian's haproxy (2 MB, as root)

The store and each server listen on ports of all interfaces, whatever address is given: run
them where only friends can reach them.

environment: SAM_POOL_PORT   of the master; metrics and the store's API take the next two (50051)
             SAM_POOL_HOST   this machine's address for the servers (127.0.0.1)
             SAM_POOL_BYTES  memory that the store contributes (256M); at least 16M; K, M, G
             SAM_POOL_MASTER_FLAGS   more flags for mooncake_master
             SAM_POOL_WHEEL  which Mooncake (mooncake-transfer-engine-non-cuda==0.3.13.post1)
             SAM_ROUTER_WHEEL  which smg (smg==1.13.0)
             SAM_POOL_LIB, SAM_POOL_RUN, SAM_ROUTER_LIB, SAM_PYTHON   where things are
exit codes:  0 ok; 1 it failed, or status: not (all) running; 2 wrong usage or values, or
             something is missing
EOF
}

say() { printf 'pool: %s\n' "$*" >&2; }
lacks() { say "$1"; say "remedy: $2"; exit 2; }

# -- values -----------------------------------------------------------------------

read_bytes() { # TEXT: prints the number of bytes
    local number=${1%[KMGkmg]}
    [[ $1 =~ ^[0-9]{1,12}[KMGkmg]?$ ]] || return 1
    number=$((10#$number))
    case $1 in
        *[Kk]) number=$((number << 10)) ;;
        *[Mm]) number=$((number << 20)) ;;
        *[Gg]) number=$((number << 30)) ;;
    esac
    printf '%s\n' "$number"
}

is_port() { [[ $1 =~ ^[1-9][0-9]{0,4}$ ]] && [ "$1" -le 65533 ]; }

read_values() { # what was asked for; of a pool that runs here, what it has
    port=${SAM_POOL_PORT:-50051} host=${SAM_POOL_HOST:-127.0.0.1}
    is_port "$port" || lacks "SAM_POOL_PORT is '$port', no port with two more behind it" \
        "a number from 1 to 65533, or unset it"
    [[ $host =~ ^[A-Za-z0-9._-]+$ ]] || lacks "SAM_POOL_HOST is '$host', no address" \
        "this machine's IPv4 address or name, or unset it"
    bytes=$(read_bytes "${SAM_POOL_BYTES:-256M}") ||
        lacks "SAM_POOL_BYTES is '$SAM_POOL_BYTES', no size" "a number of bytes, or like 4G"
    [ "$bytes" -ge "$min_bytes" ] ||
        lacks "SAM_POOL_BYTES is $SAM_POOL_BYTES, too little for a store" "at least 16M"
    if runs master || runs store; then
        read -r port host bytes <"$run/values"
    fi
}

runs() { # master|store: is it up, and ours
    local pid
    pid=$(cat "$run/$1.pid" 2>/dev/null) && [ -n "$pid" ] && [ -s "$run/values" ] &&
        tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q "mooncake.*$1"
} 2>/dev/null

# -- installing -------------------------------------------------------------------

needs_python() {
    [ -x "$python" ] || lacks "there is no $python" "scripts/setup_env.sh, or set SAM_PYTHON"
}

put_beside() { # FOLDER WHEEL: the wheel alone in the folder, whole or not at all
    [ "$(cat "$1/.wheel" 2>/dev/null)" != "$2" ] || return 0
    say "getting $2"
    local new=$1.new.$$
    mkdir -p "$new"
    if ! "$python" -m pip install --disable-pip-version-check --no-input --no-deps --quiet \
        --target "$new" "$2" >&2; then
        rm -rf "$new"
        say "$2 could not be installed"
        say "remedy: see pip's message above; a package index must be within reach"
        exit 1
    fi
    printf '%s\n' "$2" >"$new/.wheel"
    rm -rf "$1"
    mv "$new" "$1"
}

apt_install() { # PACKAGE: with root only, and quietly
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    say "installing $1"
    local get=(env DEBIAN_FRONTEND=noninteractive apt-get -y -q)
    { "${get[@]}" install "$1" || { "${get[@]}" update && "${get[@]}" install "$1"; }; } \
        >/dev/null 2>&1 </dev/null || true
}

loads() { PYTHONPATH=$lib "$python" -c 'import mooncake.store' 2>/dev/null; }

install_pool() {
    needs_python
    put_beside "$lib" "$wheel"
    chmod +x "$lib/mooncake/mooncake_master"
    ! loads || return 0
    apt_install libibverbs1
    ! loads || return 0
    PYTHONPATH=$lib "$python" -c 'import mooncake.store' 2>&1 | tail -n 1 >&2 || true
    lacks "Mooncake is in $lib and cannot be loaded" "on Debian: apt-get install libibverbs1"
}

install_router() {
    needs_python
    put_beside "$router_lib" "$router_wheel"
    command -v haproxy >/dev/null || apt_install haproxy
    say "smg: PYTHONPATH=$router_lib $python -m smg.launch_router"
    command -v haproxy >/dev/null ||
        lacks "there is no haproxy" "on Debian, as root: apt-get install haproxy"
    say "haproxy: $(command -v haproxy) -f scripts/router.cfg"
}

# -- running ----------------------------------------------------------------------

is_taken() { (exec 3<>"/dev/tcp/$host/$1") 2>/dev/null; }

needs_port() {
    ! is_taken "$1" || lacks "port $1 is taken by something else" \
        "set SAM_POOL_PORT to the first of three free ports, or end what listens there"
}

spawn() { # NAME COMMAND...
    local name=$1
    shift
    nohup "$@" >>"$run/$name.log" 2>&1 </dev/null &
    printf '%s\n' $! >"$run/$name.pid"
    while grep -qs pool.sh "/proc/$!/cmdline"; do # not yet itself
        sleep 0.02
    done
}

has_store() { # does the master know a store
    local reply
    reply=$({ exec 3<>"/dev/tcp/$host/$((port + 1))" &&
        printf 'GET /get_all_segments HTTP/1.1\r\nHost: pool\r\nConnection: close\r\n\r\n' >&3 &&
        timeout 2 cat <&3; } 2>/dev/null) || true
    [[ $reply == *$'\r\n\r\n'*[0-9]* ]]
}

wait_for_store() {
    local tries
    for tries in $(seq 300); do
        runs master && runs store || break
        ! has_store || return 0
        sleep 0.1
    done
    say "it did not come up in $tries tries; the ends of its logs:"
    tail -n 5 "$run/master.log" "$run/store.log" >&2 || true
    stop_pool
    say "remedy: see $run/*.log; a smaller SAM_POOL_BYTES, another SAM_POOL_PORT"
    exit 1
}

start_master() {
    # shellcheck disable=SC2086
    spawn master "$lib/mooncake/mooncake_master" --rpc_port="$port" --rpc_address="$host" \
        --metrics_port=$((port + 1)) --metrics_host="$host" ${SAM_POOL_MASTER_FLAGS:-}
}

start_store() {
    MOONCAKE_MASTER=$host:$port MOONCAKE_TE_META_DATA_SERVER=P2PHANDSHAKE \
        MOONCAKE_PROTOCOL=tcp MOONCAKE_GLOBAL_SEGMENT_SIZE=$bytes \
        MOONCAKE_LOCAL_HOSTNAME=$host PYTHONPATH=$lib \
        spawn store "$python" -m mooncake.mooncake_store_service --port=$((port + 2))
}

start_pool() {
    read_values
    [ "${SAM_POOL_PORT:-$port}" = "$port" ] || lacks "one runs here already, on port $port" \
        "scripts/pool.sh stop, or another SAM_POOL_RUN for a second one"
    if runs master && runs store; then
        say "runs already"
        flags
        return
    fi
    install_pool
    if runs master || runs store; then
        say "bringing back what died; the pool is empty now"
    else
        mkdir -p "$run"
        rm -f "$run"/*.log
    fi
    runs master || { needs_port "$port" && needs_port $((port + 1)); }
    runs store || needs_port $((port + 2))
    printf '%s\n' "$port $host $bytes" >"$run/values"
    runs master || start_master
    runs store || start_store
    wait_for_store
    flags
}

stop_pool() {
    local name pid n_stopped=0
    for name in store master; do
        if runs "$name"; then
            pid=$(cat "$run/$name.pid")
            n_stopped=$((n_stopped + 1))
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 50); do
                runs "$name" || break
                sleep 0.1
            done
            ! runs "$name" || kill -KILL "$pid" 2>/dev/null || true
        fi
        rm -f "$run/$name.pid"
    done
    rm -f "$run/values"
    [ "$n_stopped" -gt 0 ] || say "nothing was running"
}

status() {
    read_values
    if runs master && runs store; then
        flags
        return
    fi
    if runs master || runs store; then
        runs master && say "the store is dead" || say "the master is dead"
        say "remedy: scripts/pool.sh start brings back what died"
    else
        say "not running"
    fi
    exit 1
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

extra_config() {
    printf '{"master_server_address": "%s:%s", "metadata_server": "P2PHANDSHAKE", ' "$host" "$port"
    printf '"protocol": "tcp", "global_segment_size": 0, "local_hostname": "%s", ' "$host"
    printf '"prefetch_threshold": 64}'
}

[ $# = 1 ] || { usage >&2; exit 2; }
case $1 in
    install) install_pool ;;
    start) start_pool ;;
    stop) stop_pool ;;
    status) status ;;
    router) install_router ;;
    -h | --help) usage ;;
    *) usage >&2; exit 2 ;;
esac
