#!/usr/bin/env bash
# Several replicas on one machine behind SGLang's router, which sends a conversation where its prefix is.
#
#   pip install 'sgl-kimi-k3[router]'
#   MODEL=/models/Kimi-Linear GPUS_EACH=4 bash launch/replicas.sh [--dry-run] [any sglang flag]
#
# The router keeps a tree of what it sent where and prefers the replica with the longest match, unless
# the loads differ too much (BALANCE_*).  Replicas on other machines: start node.sh there and list
# them in WORKERS; then no replica is started here.
#
# --dry-run  print the commands, do not run them
set -euo pipefail

MODEL=${MODEL:-moonshotai/Kimi-Linear-48B-A3B-Instruct}
REPLICAS=${REPLICAS:-2}
GPUS_EACH=${GPUS_EACH:-4}            # 0: on the CPU, for a try
HOST=${HOST:-127.0.0.1}              # the router's; 0.0.0.0 to be reached from elsewhere
PORT=${PORT:-30000}                  # the router's; replicas take the ports after it
METRICS_PORT=${METRICS_PORT:-29000}  # the router's own; each replica has /metrics on its port
MATCH=${MATCH:-0.3}                  # share of a prompt known to a replica that makes it preferred
BALANCE_ABS=${BALANCE_ABS:-16}       # requests between the most and the least loaded replica, and
BALANCE_REL=${BALANCE_REL:-1.2}      # their ratio, above which load decides instead
WORKERS=${WORKERS:-}                 # "http://10.0.0.1:30000 http://10.0.0.2:30000"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/lib.sh
. "$root/launch/lib.sh"
begin "$@"

pids=()
# Each leads a process group of its own, so that a replica's schedulers end with it.
start() { setsid "$@" & pids+=($!); }
stop_all() {
  local pid
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  wait
}
trap stop_all EXIT
trap 'exit 130' INT TERM

start_replica() {
  local number=$1 port=$((PORT + 1 + $1)) gpus=()
  ((GPUS_EACH == 0)) || gpus=(--tp-size "$GPUS_EACH" --base-gpu-id $((number * GPUS_EACH))
    --attention-backend triton)
  local command=(sgl-kimi-k3 serve "$MODEL" --host 127.0.0.1 --port "$port" "${gpus[@]}"
    --trust-remote-code --enable-metrics --enable-cache-report "${flags[@]}")
  show "${command[@]}"
  workers+=("http://127.0.0.1:$port")
  ((dry_run)) || start "${command[@]}"
}

read -ra workers <<<"$WORKERS"
if ((${#workers[@]} == 0)); then
  for ((number = 0; number < REPLICAS; number++)); do start_replica "$number"; done
fi

command=(python3 -m sglang_router.launch_router --worker-urls "${workers[@]}"
  --policy cache_aware --cache-threshold "$MATCH" --balance-abs-threshold "$BALANCE_ABS"
  --balance-rel-threshold "$BALANCE_REL" --host "$HOST" --port "$PORT"
  --prometheus-port "$METRICS_PORT" --worker-startup-timeout-secs 1800)
show "${command[@]}"
((dry_run)) && exit
start "${command[@]}"
wait "${pids[-1]}"  # the router; a signal ends the wait, and with it everything
