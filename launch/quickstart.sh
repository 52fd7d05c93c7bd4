#!/usr/bin/env bash
# From nothing to a served chat: environment, small model, server, six users, hit rate.
#
#   bash launch/quickstart.sh [--port N] [--json FILE] [--keep]
#
# --port N     port on 127.0.0.1 (30000)
# --json FILE  write {hit_rate, outputs_equal, turns, server}
# --keep       leave the server running afterwards
#
# Exit status 0 only if the replies are the same with the cache off and every turn resumed where it
# should. A second run reuses the environment and the model.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/steps.sh
. "$root/launch/steps.sh"

usage() { sed -n '4,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

port=30000 keep=0 json=
while [ $# -gt 0 ]; do
  case $1 in
    --keep) keep=1 ;;
    --port | --json)
      [ $# -ge 2 ] || { usage >&2; exit 2; }
      if [ "$1" = --port ]; then port=$2; else json=$(realpath -m -- "$2"); fi
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'unknown argument: %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
if ! [[ $port =~ ^[0-9]{1,5}$ ]] || ((port < 1 || port > 65535)); then
  printf -- '--port %s: must be 1 to 65535\n' "$port" >&2
  exit 2
fi

url=http://127.0.0.1:$port
log=${XDG_CACHE_HOME:-$HOME/.cache}/sgl-kimi-k3/server-$port.log
server=

# Ends the server and every process it started: they share its process group.
stop_server() {
  [ -n "$server" ] || return 0
  kill -TERM -- "-$server" 2>/dev/null || return 0
  for _ in $(seq 40); do
    kill -0 -- "-$server" 2>/dev/null || return 0
    sleep 0.5
  done
  kill -KILL -- "-$server" 2>/dev/null || true
}

start_server() {
  # Pool and tree are recounted whenever the server is idle.  One thread: the model is tiny, and
  # threads that wait for a busy core cost more than they give.
  KIMI_K3_CHECK=1 KIMI_K3_EXPLAIN=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
    setsid "$venv/bin/sgl-kimi-k3" serve "$model" --host 127.0.0.1 --port "$port" \
    --trust-remote-code --reasoning-parser kimi_k3 --tool-call-parser kimi_k3 \
    --enable-cache-report --enable-metrics >"$log" 2>&1 &
  server=$!
  disown "$server"  # its end is ours to report, not the shell's
  local started=$SECONDS line='' shown=''
  until "$venv/bin/python" -c "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)" \
    "$url/health" 2>/dev/null; do
    # SGLang's processes outlive a server that could not bind.
    if grep -aqs 'error while attempting to bind on address' "$log"; then
      fail "port $port was taken while the server started: choose another with --port"
    fi
    if ! kill -0 "$server" 2>/dev/null; then
      tail -n 25 "$log" | cut -c1-300 >&2
      fail "the server ended while starting (whole log in $log)"
    fi
    ((SECONDS - started < 600)) || fail "the server is not healthy after 600 s (log in $log)"
    sleep 1
    line=$(grep -a '^\[20' "$log" | tail -n 1 | cut -c1-100 || true)
    if [ "$line" != "$shown" ] || (((SECONDS - started) % 15 == 0)); then
      say "  ... ${line:-importing SGLang}"
      shown=$line
    fi
  done
  grep '^sgl-kimi-k3: ' "$log" || true
}

port_is_free() {
  "$venv/bin/python" -c "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1])))" \
    "$port" 2>/dev/null
}

trap stop_server EXIT
trap 'exit 130' INT TERM

say "environment in $venv"
install serve
port_is_free || fail "port $port is in use: choose another with --port"
say "small Kimi K3, random weights"
model=$("$venv/bin/python" -m sgl_kimi_k3.demo.checkpoint)
say "  $model"
say "starting SGLang on $url (log in $log)"
start_server
say "server is up: 6 users x 4 turns over one system prompt, then the same with the cache off"
status=0
"$venv/bin/python" -m sgl_kimi_k3.demo.chat --base-url "$url" ${json:+--json "$json"} || status=$?
if ((keep)) && ((status == 0)); then
  say "the server stays up"
  printf '  %s\n' \
    "see it in a browser   $venv/bin/sgl-kimi-k3 dashboard --server $url" \
    "or in this terminal   $venv/bin/sgl-kimi-k3 top --server $url" \
    "play the chat again   $venv/bin/python -m sgl_kimi_k3.demo.chat --base-url $url" \
    "stop it               kill -- -$server"
  server=
fi
((status == 0)) || fail "the chat (see above; server log in $log)"
say "done"
