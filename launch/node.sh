#!/usr/bin/env bash
# Kimi K3 on one machine of eight GPUs.
#
#   MODEL=/models/Kimi-K3 bash launch/node.sh [--dry-run] [any sglang flag]
#
# K3 weighs 191 GiB a GPU at TP 8: it fits 8x B300, not 8x H200 (use two_nodes.sh there; a
# Kimi Linear runs here on H200).  `sgl-kimi-k3 plan $MODEL --gpu-memory ... --tp 8` says what is left.
# Change the variables below in the environment; flags given here win over them.
#
# --dry-run  print the command, do not run it
set -euo pipefail

MODEL=${MODEL:-moonshotai/Kimi-K3}
GPUS=${GPUS:-8}
HOST=${HOST:-127.0.0.1}      # 0.0.0.0 to be reached from elsewhere; then also give --api-key
PORT=${PORT:-30000}
MEMORY=${MEMORY:-0.85}       # of a GPU, for weights and arena; the rest is activations and graphs
CONTEXT=${CONTEXT:-262144}   # longest request, in tokens
REQUESTS=${REQUESTS:-64}     # at once; `sgl-kimi-k3 plan` says how many fit
KV=${KV:-auto}               # fp8_e4m3 halves a token's bytes
INTERVAL=${INTERVAL:-32768}  # tokens between states on the grid, see docs/tuning.md

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/lib.sh
. "$root/launch/lib.sh"
begin "$@"

# Triton attention: pages of one token, which this backend needs.
become sgl-kimi-k3 serve "$MODEL" --host "$HOST" --port "$PORT" --tp-size "$GPUS" \
  --attention-backend triton --mem-fraction-static "$MEMORY" --context-length "$CONTEXT" \
  --max-running-requests "$REQUESTS" --kv-cache-dtype "$KV" --kimi-k3-interval "$INTERVAL" \
  --trust-remote-code --reasoning-parser kimi_k3 --tool-call-parser kimi_k3 \
  --enable-metrics --enable-cache-report "${flags[@]}"
