"""What `sgl-kimi-k3 serve` makes of arguments on a GPU machine, without one.

`python -m tests.launch.arguments < CASES`, where CASES is a JSON list of `[GPU, arguments]`;
prints a JSON list of `{"status": int, "output": str, "resolved": {...} | null}`. SGLang parses and
resolves the arguments for real; only the device is made up (eight of a kind) and the server not
started. Each case runs in a fork, as imports take ten seconds.
"""

import json
import os
import pkgutil
import sys
import tempfile
from types import SimpleNamespace

import sglang.launch_server
import sglang.srt.configs.model_config
import torch
from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import override_platform

from sgl_kimi_k3 import cli, hooks
from tests.e2e.refusals import wait

GPUS = {
    "H200": SimpleNamespace(
        name="NVIDIA H200", total_memory=143_771 << 20, major=9, minor=0, multi_processor_count=132
    ),
    "B300": SimpleNamespace(
        name="NVIDIA B300", total_memory=268 << 30, major=10, minor=3, multi_processor_count=148
    ),
}
FIELDS = (
    *("device", "tp_size", "ep_size", "nnodes", "node_rank", "attn_dp_size", "dist_init_addr"),
    *("page_size", "attention_backend", "moe_runner_backend", "kv_cache_dtype", "context_length"),
    *("max_running_requests", "mem_fraction_static", "chunked_prefill_size", "base_gpu_id"),
    *("radix_cache_backend", "mamba_radix_cache_strategy", "enable_unified_memory", "port"),
    *("disable_overlap_schedule", "enable_metrics", "dcp_size"),
    *("prefill_attention_backend", "decode_attention_backend"),
)


def pretend_gpus(kind):
    """Eight for whoever asks torch; called after SGLang chose its modules for this machine."""
    gpu = GPUS[kind]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (gpu.major, gpu.minor)
    torch.cuda.get_device_name = lambda *_: gpu.name
    torch.cuda.get_device_properties = lambda *_: gpu
    memory_hook.get_device_memory_capacity = lambda *_: gpu.total_memory >> 20
    if gpu.major == 10:  # asked and remembered when SGLang was imported
        override_platform(is_cuda=True, is_sm100=True).__enter__()


def resolve(kind, argv):
    """One case in a fork, on GPUs of a kind."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            pretend_gpus(kind)

            def tell(server_args):
                view = resolving_view(server_args)
                told = {name: getattr(view, name) for name in FIELDS}
                answer.write(json.dumps(told).encode())
                answer.flush()

            sglang.launch_server.run_server = tell
            status = 3  # an exception that nobody turned into a message
            try:
                status = cli.main([*argv, "--device", "cuda"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = wait(child)
        output.seek(0)
        answer.seek(0)
        told = answer.read()
        return {
            "status": status,
            "output": output.read().decode("utf-8", "replace"),
            "resolved": json.loads(told) if told else None,
        }


if __name__ == "__main__":
    for hook in hooks.HOOKS:  # import what a case would, once and as on a CPU
        pkgutil.resolve_name(hook.target)
    print(json.dumps([resolve(*case) for case in json.load(sys.stdin)]))
