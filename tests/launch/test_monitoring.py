"""Whatever scrapes a server finds the pods that have numbers, and gives their series our names."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import prometheus_client
import pytest
import yaml
from prometheus_client.exposition import choose_encoder

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
KUBERNETES = LAUNCH / "kubernetes"
META = "__meta_kubernetes_"
WITH_NUMBERS = {"kimi-k3-0:30000", "kimi-k3-tp16-0:30000", "kimi-k3-router-0:29000"}
FILES = [LAUNCH / "prometheus.yml", KUBERNETES / "prometheus.yml", KUBERNETES / "monitor.yaml"]
SNAKE = re.compile(r"(?<=[a-z])(?=[A-Z])")

# What they send as `Accept`: by default, and Prometheus 3 with `metric_name_escaping_scheme`.
ACCEPTS = {
    "Prometheus 2.42": "application/openmetrics-text;version=1.0.0,"
    "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "Prometheus 3, underscores": "application/openmetrics-text;version=1.0.0;"
    "escaping=underscores;q=0.5,text/plain;version=1.0.0;escaping=underscores;q=0.3,*/*;q=0.1",
    "text only": "text/plain;version=0.0.4",
}


def jobs(path):
    """Scrape jobs of a Prometheus file, or what the operator makes of a PodMonitor."""
    document = yaml.safe_load(path.read_text("utf-8"))
    if "scrape_configs" in document:
        return document["scrape_configs"]
    made = []
    (select,) = document["spec"]["selector"]["matchExpressions"]
    assert select["operator"] == "In"
    for number, endpoint in enumerate(document["spec"]["podMetricsEndpoints"]):
        chosen = {
            f"{META}pod_label_{select['key']}": "|".join(select["values"]),
            f"{META}pod_container_port_name": endpoint["port"],
        }
        keep = [
            {"action": "keep", "source_labels": [label], "regex": regex}
            for label, regex in chosen.items()
        ]
        made.append(
            {
                "job_name": f"endpoint {number}",
                "metrics_path": endpoint["path"],
                "relabel_configs": keep + snake(endpoint.get("relabelings", [])),
                "metric_relabel_configs": snake(endpoint.get("metricRelabelings", [])),
            }
        )
    return made


def snake(rules):
    return [{SNAKE.sub("_", key).lower(): value for key, value in rule.items()} for rule in rules]


def pods():
    """What Kubernetes tells of each port of each pod of the manifests."""
    for path in sorted(KUBERNETES.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            if document["kind"] not in ("Deployment", "StatefulSet"):
                continue
            template = document["spec"]["template"]
            for number in range(document["spec"]["replicas"]):
                name = f"{document['metadata']['name']}-{number}"
                labels = {f"{META}pod_label_app": template["metadata"]["labels"]["app"]}
                if document["kind"] == "StatefulSet":
                    labels[f"{META}pod_label_apps_kubernetes_io_pod_index"] = str(number)
                for port in template["spec"]["containers"][0]["ports"]:
                    named = {f"{META}pod_container_port_name": port["name"]}
                    address = f"{name}:{port['containerPort']}"
                    yield {"targets": [address], "labels": labels | named}


@pytest.mark.parametrize("name", ["prometheus.yml", "monitor.yaml"])
def test_a_prometheus_in_the_cluster_scrapes_the_pods_with_numbers(name, tmp_path):
    """Prometheus applies the rules to our pods, read from a file instead of an API server."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt install prometheus (tests/run.sh does)")
    (tmp_path / "pods.json").write_text(json.dumps(list(pods())), "utf-8")
    config = {"scrape_configs": jobs(KUBERNETES / name)}
    for job in config["scrape_configs"]:
        job.pop("kubernetes_sd_configs", None)
        job["file_sd_configs"] = [{"files": [str(tmp_path / "pods.json")]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    kept = {}
    for job in config["scrape_configs"]:
        for patience_s in (1, 5, 30):  # it always waits that long for more
            found = discovered(tmp_path / "prometheus.yml", job["job_name"], patience_s)
            if found:
                break
        assert len(found) == len(list(pods())), "it read every port"
        for target in found:
            if target.get("labels"):
                kept[target["labels"]["__address__"]] = target["labels"]["__metrics_path__"]
    assert set(kept) == WITH_NUMBERS
    assert {path.rstrip("/") for path in kept.values()} == {"/metrics"}


def discovered(config, job, patience_s):
    """Every target: `discoveredLabels`, and the `labels` the rules leave it with if kept."""
    done = subprocess.run(
        ["promtool", "check", "service-discovery", f"--timeout={patience_s}s", str(config), job],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) or []


@pytest.mark.parametrize("accept", ACCEPTS.values(), ids=ACCEPTS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LAUNCH)))
def test_every_prometheus_stores_our_names(path, accept):
    """As SGLang answers, so renamed as the job says: names with a `:`, each once."""
    registry = prometheus_client.CollectorRegistry()
    for prefix in ("kimi_k3", "sglang"):
        prometheus_client.Gauge(f"{prefix}:pins", "", registry=registry)
        prometheus_client.Histogram(f"{prefix}:age_seconds", "", registry=registry, buckets=(1,))
    prometheus_client.Gauge("python_info", "", registry=registry)
    encode, _ = choose_encoder(accept)
    lines = encode(registry).decode().splitlines()
    names = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    (rule,) = jobs(path)[0]["metric_relabel_configs"]
    assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
    target = re.sub(r"\$(\d)", r"\\\1", rule["replacement"])
    stored = {re.sub(rf"^(?:{rule['regex']})$", target, name) for name in names}
    parts = ("pins", "age_seconds_bucket", "age_seconds_count", "age_seconds_sum")
    ours = {f"{prefix}:{part}" for prefix in ("kimi_k3", "sglang") for part in parts}
    assert {name for name in stored if not name.endswith("_created")} == ours | {"python_info"}


def test_no_pod_is_annotated_for_a_job_that_keeps_what_it_is_given():
    """The usual job for `prometheus.io/scrape` renames nothing."""
    for path in KUBERNETES.glob("*.yaml"):
        assert "prometheus.io/" not in path.read_text("utf-8"), path.name
