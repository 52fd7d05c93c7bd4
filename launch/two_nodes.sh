#!/usr/bin/env bash
# Kimi K3 on two machines of eight GPUs, TP 16: what 8x H200 twice can hold.
#
#   on the first:   MODEL=/models/Kimi-K3 HEAD=10.0.0.1:5000 RANK=0 bash launch/two_nodes.sh
#   on the second:  MODEL=/models/Kimi-K3 HEAD=10.0.0.1:5000 RANK=1 bash launch/two_nodes.sh
#
# HEAD is the first machine's address on the fast network, with a free port.  Requests go to the first.
# Both machines need the same version of this package and the same variables: every rank plans for
# itself and must come to the same plan.  [--dry-run] [any sglang flag]
#
# --dry-run  print the command, do not run it
set -euo pipefail

MODEL=${MODEL:-moonshotai/Kimi-K3}
HEAD=${HEAD:-}
RANK=${RANK:-}
GPUS=${GPUS:-16}             # of both machines
HOST=${HOST:-127.0.0.1}      # 0.0.0.0 to be reached from elsewhere; then also give --api-key
PORT=${PORT:-30000}
MEMORY=${MEMORY:-0.85}       # of a GPU, for weights (101 GiB of K3 at TP 16) and arena
CONTEXT=${CONTEXT:-262144}   # longest request, in tokens
REQUESTS=${REQUESTS:-64}     # at once; `sgl-kimi-k3 plan` says how many fit
KV=${KV:-auto}               # fp8_e4m3 halves a token's bytes
INTERVAL=${INTERVAL:-32768}  # tokens between states on the grid, see docs/tuning.md
MOE=${MOE:-marlin}           # MXFP4 experts on Hopper; auto on Blackwell

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/lib.sh
. "$root/launch/lib.sh"
begin "$@"

if ! [[ $HEAD =~ ^[^:]+:[0-9]+$ ]]; then
  printf 'HEAD=%s: set it to the first machine and a free port, such as 10.0.0.1:5000\n' "$HEAD" >&2
  exit 2
fi
if ! [[ $RANK =~ ^[01]$ ]]; then
  printf 'RANK=%s: set it to 0 on the first machine and to 1 on the second\n' "$RANK" >&2
  exit 2
fi

# NCCL and Gloo choose a network by themselves; name it if they choose the wrong one:
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
become sgl-kimi-k3 serve "$MODEL" --host "$HOST" --port "$PORT" \
  --tp-size "$GPUS" --ep-size "$GPUS" --nnodes 2 --node-rank "$RANK" --dist-init-addr "$HEAD" \
  --moe-runner-backend "$MOE" --attention-backend triton --mem-fraction-static "$MEMORY" \
  --context-length "$CONTEXT" --max-running-requests "$REQUESTS" --kv-cache-dtype "$KV" \
  --kimi-k3-interval "$INTERVAL" --trust-remote-code --reasoning-parser kimi_k3 \
  --tool-call-parser kimi_k3 --enable-metrics --enable-cache-report "${flags[@]}"
