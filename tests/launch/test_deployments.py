"""Every deployment file: linted by its own tool, its server arguments resolved by SGLang."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
BIN = Path(sys.executable).parent
SCRIPTS = ("node.sh", "two_nodes.sh", "dp_attention.sh", "replicas.sh")
MANIFESTS = sorted((LAUNCH / "kubernetes").glob("*.yaml"))
VARIABLES = {
    "node.sh": {},
    "two_nodes.sh": {"HEAD": "10.0.0.1:5000", "RANK": "1"},
    "dp_attention.sh": {},
    "replicas.sh": {"GPUS_EACH": "4"},
}
K3_FLAGS = ["--attention-backend", "triton"]

# flags -> what the one line must say
REFUSED = {
    ("--dcp-size", "8"): ("--attention-backend triton", "--decode-attention-backend cutedsl_mla"),
    ("--dcp-size", "8", "--attention-backend", "cutedsl_mla"): (
        *("--dcp-size 8", "needs a Blackwell", "SM90", "Drop --dcp-size"),
    ),
    ("--dcp-size", "3"): ("--dcp-size 3", "--tp-size 8", "Use --dcp-size 2 or 4 or 8"),
    ("--kimi-k3-interval", "100"): ("KIMI_K3_INTERVAL=100", "64 and 128"),
    ("--kv-cache-dtype", "mxfp8"): ("--kv-cache-dtype mxfp8", "Use --kv-cache-dtype fp8_e4m3"),
}

# On B300: variables of dp_attention.sh, flags behind it
SPREAD = {
    "DCP": ({"DCP": "4"}, ()),
    "DCP of all GPUs": ({"DCP": "8", "REPLICAS": "1"}, ()),
    "DCP, pages too large": ({"DCP": "4"}, ("--kimi-k3-grid", "64")),
    "DCP, chunks too small": ({"DCP": "4", "CHUNK": "16200"}, ()),
    "DCP across replicas": ({"DCP": "8"}, ()),
}


def said(script, *arguments, **variables):
    """Output of a script, with `sgl-kimi-k3` and `python3` of this environment on its path."""
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
        stdin=subprocess.DEVNULL,
    )


def commands(script, **variables):
    """The commands it shows, as words."""
    done = said(script, "--dry-run", **{**VARIABLES[script], **variables})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert lines
    return [shlex.split(line[2:]) for line in lines]


def containers():
    """Container by manifest name, for those that run our image."""
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            for container in (
                document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ())
            ):
                yield path.name, container


def servers(model):
    """Arguments of `sgl-kimi-k3` by the file that gives them."""
    found = {}
    for script in SCRIPTS:
        for number, words in enumerate(commands(script, MODEL=model)):
            if words[0] == "sgl-kimi-k3":
                found[f"{script} {number}"] = words[1:]
    unit = (LAUNCH / "sgl-kimi-k3.service").read_text("utf-8")
    flags = re.search(r'^Environment="FLAGS=(.*)"$', unit, re.MULTILINE)[1]
    line = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1]
    line = line.replace("${MODEL}", model).replace("$FLAGS", flags)
    found["sgl-kimi-k3.service"] = shlex.split(line)[1:]
    for name, container in containers():
        if container["args"][0] == "serve":
            words = [word.replace("$(RANK)", "1") for word in container["args"]]
            found[name] = [words[0], model, *words[2:]]
    return found


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k3")
    shutil.copy(LAUNCH / "kimi_k3.config.json", folder / "config.json")
    return str(folder)


@pytest.fixture(scope="module")
def answers(k3):
    """What `serve` makes of every file's arguments and of each refused combination."""
    old = commands("dp_attention.sh", MODEL=k3)[0][1:]
    at = old.index("--attn-dp-size")
    old[at : at + 1] = ["--enable-dp-attention", "--dp-size"]
    cases = servers(k3) | {"dp_attention.sh, old spelling": old}
    cases |= {words: ["serve", k3, "--tp-size", "8", *K3_FLAGS, *words] for words in REFUSED}
    cases = {name: ("H200", words) for name, words in cases.items()}
    for name, (variables, flags) in SPREAD.items():
        (words,) = commands("dp_attention.sh", MODEL=k3, **variables)
        cases[name] = ("B300", [*words[1:], *flags])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.launch.arguments"],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_every_file_resolves(answers, k3):
    files = servers(k3)
    assert {name.split()[0] for name in files} == {
        *SCRIPTS, "sgl-kimi-k3.service", "node.yaml", "two_nodes.yaml",
    }  # fmt: skip
    for name in files:
        answer = answers[name]
        assert answer["status"] == 0, (name, answer["output"][-2000:])
        resolved = answer["resolved"]
        assert resolved["radix_cache_backend"] == "kimi_k3", name
        assert resolved["enable_unified_memory"] is True, name
        assert resolved["mamba_radix_cache_strategy"] == "no_buffer", name
        assert resolved["disable_overlap_schedule"] is False, name
        assert (resolved["device"], resolved["page_size"]) == ("cuda", 1), name
        assert resolved["enable_metrics"] is True, name
        assert "one KDA state" in answer["output"], name


def test_what_is_particular_to_each(answers):
    node = answers["node.sh 0"]["resolved"]
    assert (node["tp_size"], node["nnodes"], node["context_length"]) == (8, 1, 262_144)
    assert node["mem_fraction_static"] == 0.85
    assert "one KDA state 53.6 MiB" in answers["node.sh 0"]["output"]
    for name in ("two_nodes.sh 0", "two_nodes.yaml"):
        two = answers[name]["resolved"]
        assert (two["tp_size"], two["ep_size"], two["nnodes"], two["node_rank"]) == (16, 16, 2, 1)
        assert two["moe_runner_backend"] == "marlin"
        assert "one KDA state 26.8 MiB" in answers[name]["output"]
    spread = answers["dp_attention.sh 0"]["resolved"]
    assert (spread["tp_size"], spread["ep_size"], spread["attn_dp_size"]) == (8, 8, 2)
    assert spread["chunked_prefill_size"] == 16_384 // 2
    assert "one KDA state 107.1 MiB" in answers["dp_attention.sh 0"]["output"]
    deprecated = answers["dp_attention.sh, old spelling"]["resolved"]
    assert {**deprecated, "port": spread["port"]} == spread
    first, second = (answers[f"replicas.sh {n}"]["resolved"] for n in range(2))
    assert (first["base_gpu_id"], second["base_gpu_id"]) == (0, 4)
    assert (first["port"], second["port"]) == (30_001, 30_002)


@pytest.mark.parametrize(("name", "dcp"), [("DCP", 4), ("DCP of all GPUs", 8)])
def test_k3_spreads_its_kv_over_a_replica_of_b300(answers, name, dcp):
    answer = answers[name]
    assert answer["status"] == 0, answer["output"][-2000:]
    spread = answer["resolved"]
    assert (spread["tp_size"], spread["dcp_size"], spread["attn_dp_size"]) == (8, dcp, 8 // dcp)
    assert (spread["page_size"], spread["radix_cache_backend"]) == (64, "kimi_k3")
    kernels = spread["prefill_attention_backend"], spread["decode_attention_backend"]
    assert kernels == ("trtllm_mla", "cutedsl_mla")
    assert f"on one of {dcp} ranks" in answer["output"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DCP, pages too large", ("64 over --dcp-size 4 is 256 tokens", "KIMI_K3_GRID=256")),
        ("DCP, chunks too small", ("--chunked-prefill-size leaves 8100", "such as 8192")),
        ("DCP across replicas", ("--dcp-size 8", "4 rank(s)", "Use --dcp-size 2 or 4")),
    ],
)
def test_what_cannot_be_spread_is_refused(answers, name, told):
    answer = answers[name]
    assert answer["status"] == 2, answer["output"][-2000:]
    assert all(part in answer["output"].splitlines()[-1] for part in told), answer["output"][-500:]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_is_not_supported_is_refused_with_the_value(answers, words):
    answer = answers[words]
    assert answer["status"] == 2
    assert answer["resolved"] is None
    line = answer["output"].splitlines()[-1]
    for part in REFUSED[words]:
        assert part in line


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_tell_and_obey(script):
    helped = said(script, "--help")
    assert helped.returncode == 0
    assert "--dry-run" in helped.stdout
    assert "set -euo pipefail" in (LAUNCH / script).read_text("utf-8")
    served = [words for words in commands(script, PORT="31000") if words[0] == "sgl-kimi-k3"]
    assert all(int(words[words.index("--port") + 1]) >= 31_000 for words in served)
    last = said(script, "--dry-run", "--log-level", "debug", **VARIABLES[script]).stdout
    assert "--log-level debug" in last


@pytest.mark.parametrize("script", ["two_nodes.sh", "dp_attention.sh"])
def test_several_machines_ask_for_what_they_need(script):
    for variables in ({}, {"HEAD": "10.0.0.1", "RANK": "0"}, {"HEAD": "a:1", "RANK": "2"}):
        done = said(script, "--dry-run", **{"NODES": "2", "HEAD": "", "RANK": "", **variables})
        assert done.returncode == 2
        assert "set it to" in done.stderr


def test_dp_attention_over_machines():
    variables = {"NODES": "4", "GPUS": "32", "REPLICAS": "4", "HEAD": "a:1", "RANK": "3"}
    (words,) = commands("dp_attention.sh", **variables)
    for flag, value in (("--tp-size", "32"), ("--nnodes", "4"), ("--node-rank", "3")):
        assert words[words.index(flag) + 1] == value


def test_the_router_is_told_of_every_replica():
    *replicas, router = commands("replicas.sh", REPLICAS="3", GPUS_EACH="2")
    ports = [words[words.index("--port") + 1] for words in replicas]
    urls = router[router.index("--worker-urls") + 1 : router.index("--policy")]
    assert urls == [f"http://127.0.0.1:{port}" for port in ports]
    assert len(set(ports)) == 3
    elsewhere = commands("replicas.sh", WORKERS="http://a:1 http://b:2")
    assert [words[0] for words in elsewhere] == ["python3"]
    assert "http://b:2" in elsewhere[0]


def test_a_signal_ends_replicas_and_router(tmp_path):
    """With stand-ins that only wait: each says its pid and process group."""
    for name in ("sgl-kimi-k3", "python3"):
        stand_in = tmp_path / name
        stand_in.write_text('#!/bin/bash\necho "pid $$"\nexec sleep 600\n', "utf-8")
        stand_in.chmod(0o755)
    script = subprocess.Popen(
        ["bash", str(LAUNCH / "replicas.sh")],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = []
    while len(pids) < 3:
        line = script.stdout.readline()
        assert line, f"ended with {script.wait()}"
        if line.startswith("pid "):
            pids.append(int(line.split()[1]))
    script.terminate()
    assert script.wait(timeout=60) == 130
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_the_router_takes_its_arguments():
    from sglang_router.launch_router import parse_router_args

    lines = [commands("replicas.sh")[-1][3:]]
    lines += [each["args"] for _, each in containers() if each["args"][0] != "serve"]
    assert len(lines) == 2
    for words in lines:
        parsed = parse_router_args(words)
        assert parsed.policy == "cache_aware"
        assert (parsed.balance_abs_threshold, parsed.cache_threshold) == (16, 0.3)


def test_shell_is_clean():
    paths = [*LAUNCH.glob("*.sh"), ROOT / "tests/run.sh", ROOT / ".ci/run"]
    run_tool("shellcheck", "--external-sources", *paths)


def test_manifests_are_valid():
    ours = [path for path in MANIFESTS if path.name != "monitor.yaml"]  # the operator's own kind
    assert [path.name for path in ours] == ["node.yaml", "router.yaml", "two_nodes.yaml"]
    run_tool("kubernetes-validate", "--strict", *ours)
    for name, container in containers():
        assert container["image"].startswith("registry.example.com/sgl-kimi-k3:"), name


def test_the_container_file_is_clean():
    run_tool("hadolint", "--no-color", LAUNCH / "Containerfile")
    text = (LAUNCH / "Containerfile").read_text("utf-8")
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    named = [name for line in copied for name in line.split()]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages | {"pyproject.toml", "README.md", "LICENSE"} == {Path(n).name for n in named}
    assert all((ROOT / name).exists() for name in named)


def test_the_unit_is_valid(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    unit = (LAUNCH / "sgl-kimi-k3.service").read_text("utf-8")
    here = tmp_path / "sgl-kimi-k3.service"  # the same, with a program that exists
    here.write_text(unit.replace("/opt/sgl-kimi-k3/bin/sgl-kimi-k3", "/bin/true"), "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(here)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def run_tool(name, *arguments):
    done = subprocess.run(
        [str(BIN / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
