"""Run the command line once per case, each in a fork of a process that imported SGLang once.

`python -m tests.e2e.refusals < CASES`, where CASES is a JSON list of
`{"argv": [...], "env": {...}}`; prints a JSON list of `{"status": int, "output": str}`, stdout and
stderr of a case together. What a case prints and how it ends is what `sgl-kimi-k3` does; a start
of its own would cost ten seconds of imports each.
"""

import json
import os
import sys
import tempfile
import time

import sglang.launch_server

from sgl_kimi_k3 import cli

PATIENCE_S = 180.0


def run(argv, env):
    """One case in a fork; a case that does not end counts as status -1."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ.update(env)
            status = 3  # an exception that nobody turned into a message
            try:
                status = cli.main(argv)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = wait(child)
        output.seek(0)
        return {"status": status, "output": output.read().decode("utf-8", "replace")}


def wait(child):
    """The exit status."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


if __name__ == "__main__":
    assert sglang.launch_server
    print(json.dumps([run(case["argv"], case["env"]) for case in json.load(sys.stdin)]))
