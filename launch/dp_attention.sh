#!/usr/bin/env bash
# Kimi K3 with DP attention: experts over all GPUs, attention and its cache in REPLICAS groups of them.
#
#   one machine:       MODEL=/models/Kimi-K3 bash launch/dp_attention.sh
#   each of four:      NODES=4 GPUS=32 HEAD=10.0.0.1:5000 RANK=0..3 MODEL=... bash launch/dp_attention.sh
#
# Under plain TP every GPU holds the KV of every request, here only those of its replica do, so more
# requests fit: `sgl-kimi-k3 plan $MODEL --gpu-memory ... --tp GPUS --dp-attention REPLICAS` says how many.
# K3 weighs 199 GiB a GPU at 8 GPUs and 2 replicas, which B300 hold, and 62 GiB at 32 GPUs and 4.
#
# DCP=N spreads the KV of a replica's requests over N of its GPUs, so that of each token only one holds
# the row: `plan ... --dcp N`.  For K3 that takes a Blackwell; its pages are 64 tokens on each rank:
#
#   eight B300:        DCP=4 REPLICAS=2 MODEL=/models/Kimi-K3 bash launch/dp_attention.sh
#
# A conversation stays on its replica, where its prefix is, unless that one is crowded;
# `"routed_dp_rank": N` (0 to REPLICAS - 1) in a request decides otherwise.
# Kimi Linear is refused: SGLang's class splits its states over all GPUs.  [--dry-run] [any sglang flag]
#
# --dry-run  print the command, do not run it
set -euo pipefail

MODEL=${MODEL:-moonshotai/Kimi-K3}
GPUS=${GPUS:-8}              # of all machines
REPLICAS=${REPLICAS:-2}      # each of GPUS / REPLICAS GPUs, which split a state's heads
DCP=${DCP:-1}                # GPUs of a replica that share one copy of its KV; divides GPUS / REPLICAS
NODES=${NODES:-1}
HEAD=${HEAD:-}               # of several machines: the first's address on the fast network, a free port
RANK=${RANK:-}               # and which one this is, 0 to NODES - 1
HOST=${HOST:-127.0.0.1}      # 0.0.0.0 to be reached from elsewhere; then also give --api-key
PORT=${PORT:-30000}
MEMORY=${MEMORY:-0.88}       # of a GPU, for weights and arena
CONTEXT=${CONTEXT:-262144}   # longest request, in tokens
REQUESTS=${REQUESTS:-64}     # at once, over all replicas
CHUNK=${CHUNK:-16384}        # prompt tokens of a pass, over all replicas
KV=${KV:-auto}               # fp8_e4m3 halves a token's bytes
INTERVAL=${INTERVAL:-32768}  # tokens between states on the grid, see docs/tuning.md
MOE=${MOE:-auto}             # marlin for MXFP4 experts on Hopper

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/lib.sh
. "$root/launch/lib.sh"
begin "$@"

machines=()
if ((NODES > 1)); then
  if ! [[ $HEAD =~ ^[^:]+:[0-9]+$ ]]; then
    printf 'HEAD=%s: set it to the first machine and a free port, such as 10.0.0.1:5000\n' "$HEAD" >&2
    exit 2
  fi
  if ! [[ $RANK =~ ^[0-9]+$ ]] || ((RANK >= NODES)); then
    printf 'RANK=%s: set it to 0 on the first machine, up to %d on the last\n' "$RANK" $((NODES - 1)) >&2
    exit 2
  fi
  machines=(--nnodes "$NODES" --node-rank "$RANK" --dist-init-addr "$HEAD")
fi

kernel=(--attention-backend triton)
if ((DCP > 1)); then
  # SGLang sets K3's kernels for spread rows itself, trtllm_mla and cutedsl_mla; states on the grid stand
  # at the ends of pages of all ranks.
  kernel=(--dcp-size "$DCP" --page-size 64 --kimi-k3-grid $((64 * DCP)))
fi

become sgl-kimi-k3 serve "$MODEL" --host "$HOST" --port "$PORT" \
  --tp-size "$GPUS" --ep-size "$GPUS" --attn-dp-size "$REPLICAS" "${machines[@]}" \
  --moe-runner-backend "$MOE" "${kernel[@]}" --mem-fraction-static "$MEMORY" \
  --context-length "$CONTEXT" --max-running-requests "$REQUESTS" --chunked-prefill-size "$CHUNK" \
  --kv-cache-dtype "$KV" --kimi-k3-interval "$INTERVAL" --trust-remote-code \
  --reasoning-parser kimi_k3 --tool-call-parser kimi_k3 --enable-metrics --enable-cache-report \
  "${flags[@]}"
