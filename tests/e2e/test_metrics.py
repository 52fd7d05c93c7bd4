"""`/metrics` of real servers: a known load counted exactly, and a real Prometheus beside it."""

import json
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from math import isnan
from pathlib import Path

import pytest
import requests
import yaml

from tests.e2e.prompts import words
from tests.e2e.server import end, excerpt, free_port

pytestmark = pytest.mark.e2e

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
PANELS = json.loads((LAUNCH / "dashboards/kimi_k3.json").read_text("utf-8"))["panels"]
WINDOW = "2m"
PATIENCE_S = 180.0


def test_a_known_load_reads_exactly_right(timed):
    """Junctions only, every 64 tokens; a namespace of its own, so that chance shares nothing."""
    prompt = words("known load", 100)
    before = timed.settle()
    first = timed.generate(prompt, cache_salt="known")  # states at 100 and 107
    again = timed.generate(prompt, cache_salt="known")  # proves it shared: one at 64
    third = timed.generate(prompt, cache_salt="known")
    turn = [*prompt, *first.ids, *words("known turn", 20)]
    turn_2 = timed.generate(turn, cache_salt="known")
    with ThreadPoolExecutor(1) as pool:
        body = words("known abort", 90), 400
        aborted = pool.submit(timed.generate, *body, cache_salt="aborted", rid="known-abort")
        while timed.metrics().since(before, "kimi_k3:requests_total") < 5:
            time.sleep(0.05)
        timed.abort("known-abort")
        assert aborted.result().finish == "abort"
    told = [reply.cached_tokens for reply in (first, again, third, turn_2)]
    assert told == [0, 0, 64, 107]
    after = timed.settle()
    expected = {
        "requests_total": 5,
        "input_tokens_total": 100 + 100 + 100 + 128 + 90,
        "matched_tokens_total": 0 + 100 + 100 + 107 + 0,
        "resumed_tokens_total": 64 + 107,
        'hit_tokens_total{kind="junction"}': 64,
        'hit_tokens_total{kind="turn_end"}': 107,
        'hit_tokens_total{kind="prompt_end"}': 0,
        'lost_tokens_total{reason="new"}': 100 + 90,
        'lost_tokens_total{reason="no_checkpoint"}': 99 + 35,
        # Pages of 64: the 21 tokens of turn 2 are less than one, so nobody knows if they are new.
        'lost_tokens_total{reason="too_short"}': 1 + 1 + 21,
        'lost_tokens_total{reason="diverged"}': 0,
        'lost_tokens_total{reason="evicted"}': 0,
        'lost_tokens_total{reason="refused"}': 0,
        'checkpoints_taken_total{kind="junction"}': 1,
        'checkpoints_taken_total{kind="prompt_end"}': 1 + 1 + 1,
        'checkpoints_refused_total{cause="present",kind="prompt_end"}': 2,
        'checkpoints_refused_total{cause="present",kind="turn_end"}': 2,
        "retracted_requests_total": 0,
        "hit_age_seconds_count": 2,
    }
    assert {name: after.since(before, f"kimi_k3:{name}") for name in expected} == expected
    assert_explained(timed)


def assert_explained(server):
    """The same five requests, one by one: in the live report and in the log."""
    (state,) = server.info()["internal_states"]
    rows = [
        (row["prompt_tokens"], row["matched"], row["resumed"], row["kind"], row["junction"])
        for row in state["kimi_k3"]["requests"][-5:]
    ]
    assert rows == [
        (100, 0, 0, None, None),
        (100, 100, 0, None, 64),
        (100, 100, 64, "junction", None),
        (128, 107, 107, "turn_end", None),
        (90, 0, 0, None, None),
    ]
    (line,) = [one for one in server.read_log().splitlines() if "rid=known-abort" in one]
    told = "prompt=90 matched=0 resumed=0 kind=- junction=- diverged_at=- lost: new=90"
    assert line.endswith(told)


class Prometheus:
    """One that scrapes a server as launch/prometheus.yml says, with our rules."""

    def __init__(self, url):
        self.url = url

    def query(self, expr):
        answer = requests.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=30)
        assert answer.status_code == 200, (expr, answer.text)
        return [float(row["value"][1]) for row in answer.json()["data"]["result"]]

    def rules(self):
        groups = requests.get(f"{self.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def prometheus(tight, tmp_path_factory):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is missing: apt install prometheus (tests/run.sh does)")
    scratch = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((LAUNCH / "prometheus.yml").read_text("utf-8"))
    rules = (
        (LAUNCH / "rules/kimi_k3.yml").read_text("utf-8").replace("interval: 30s", "interval: 1s")
    )
    (scratch / "rules.yml").write_text(rules, "utf-8")
    config["rule_files"] = ["rules.yml"]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [tight.base_url.split("//")[1]]
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    port, log = free_port(), scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={scratch}/prometheus.yml",
                f"--storage.tsdb.path={scratch}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    served = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: ready(served.url), lambda: excerpt(log))
        yield served
    finally:
        end(process)


def ready(url):
    try:
        return requests.get(f"{url}/-/ready", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def wait_for(holds, complaint):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.5)


def load(server):
    """More than fits, and each prompt's continuation: hits and evictions."""
    for i in range(5):
        prompt = words(f"watched {i}", 250)
        said = server.generate(prompt, 2).ids
        server.generate([*prompt, *said, *words(f"continued {i}", 5)], 2)


def test_every_panel_and_rule_returns_data(tight, prometheus):
    """Under load, from a real Prometheus: a number in each query of each panel."""
    wait_for(lambda: prometheus.query("up") == [1.0], lambda: "no scrape succeeds")
    queries = {(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]}

    def empty():
        found = {
            (title, expr): prometheus.query(
                expr.replace("$window", WINDOW).replace("$instance", ".+")
            )
            for title, expr in queries
        }
        # NaN is a division by nothing that happened.
        return [key for key, rows in found.items() if not rows or any(map(isnan, rows))]

    def filled():
        load(tight)
        return not empty()

    wait_for(filled, lambda: f"no data: {empty()}")
    rules = prometheus.rules()
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert recorded

    def missing():
        """Rules are evaluated once a second, so theirs come a little later than a panel's."""
        return [name for name in recorded if not prometheus.query(name)]

    wait_for(lambda: not missing(), lambda: f"not recorded: {missing()}")


def test_prometheus_shows_what_the_server_counted(tight, prometheus):
    seen = tight.settle()

    def shown():
        return prometheus.query("sum(max without (tp_rank) (kimi_k3:input_tokens_total))")

    wanted = [seen["kimi_k3:input_tokens_total"]]
    wait_for(lambda: shown() == wanted, lambda: f"{shown()} instead of {wanted}")
    parts = prometheus.query("sum(max without (tp_rank) (kimi_k3:arena_bytes))")
    assert parts == [tight.arena_bytes()]
