"""SGLang's own server kits, as shipped in its wheel (`sglang/test/kits`), against our server.

Left out or replaced, because the small K3 has random weights, so it knows no capital of France:

- `basic_decode_correctness_kit`: `test_capital_france`, `test_basic_math`, `test_color_completion`
  ask for facts. Nothing takes their place here; the model tests compare logits instead.
- `basic_scheduler_stress_kit`: `test_streaming_response` and `test_concurrent_requests` look for
  "paris" and the like; run with the same requests, they look for the answer given alone.
- `prefix_cache_branching_kit` counts "hi" as one token; its texts are sent as one id per word.
- `radix_cache_server_kit` and `cache_hit_kit` run at a size for a CPU, with ids of our vocabulary.

The other kits of that folder test features this backend does not touch (constrained decoding,
reasoning, images, speculation, benchmarks) or refuses (PD).
"""

from __future__ import annotations

import itertools
import json
import random
import time
import unittest
from unittest import mock

import pytest
import requests
from sglang.test.kits import basic_scheduler_stress_kit as stress
from sglang.test.kits import cache_hit_kit, radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin

from sgl_kimi_k3.demo.tokenizer import vocabulary
from tests.e2e.conftest import RUNNING_S, WAITING_S
from tests.e2e.prompts import words

pytestmark = pytest.mark.e2e


class OnServer(unittest.TestCase):
    """What the kits' mixins expect of a test case."""

    @pytest.fixture(autouse=True)
    def _on_roomy(self, roomy):
        self._on(roomy)

    @classmethod
    def _on(cls, server):
        cls.server, cls.base_url, cls.process = server, server.base_url, server.process
        cls.model = server.model

    @classmethod
    def flush_cache(cls):
        cls.server.flush()


class OnTimedServer(OnServer):
    @pytest.fixture(autouse=True)
    def _on_roomy(self, timed):
        self._on(timed)


class TestDecodeCorrectness(BasicDecodeCorrectnessMixin, OnServer):
    sanity_max_new_tokens_short = 16
    sanity_max_new_tokens_long = 48

    test_capital_france = None
    test_basic_math = None
    test_color_completion = None


class TestSchedulerStress(BasicSchedulerStressMixin, OnServer):
    sanity_max_new_tokens_short = 12

    def _stress_generate(self, prompt, max_new_tokens):
        """The long prompt is 8,000 words of filler: several chunks, not minutes, will do."""
        if len(prompt) > 2000:
            prompt = prompt[:600] + prompt[-100:]
        return super()._stress_generate(prompt, max_new_tokens)

    def test_streaming_response(self):
        question = stress._CONCURRENT_QA[0][0]
        alone = self._stress_generate(question, self.sanity_max_new_tokens_short)
        sampling = {"temperature": 0.0, "max_new_tokens": self.sanity_max_new_tokens_short}
        wanted = {"text": question, "sampling_params": sampling, "stream": True}
        with requests.post(
            self.base_url + "/generate", json=wanted, stream=True, timeout=120
        ) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith(b"data: {")]
        texts = [json.loads(line.removeprefix(b"data: "))["text"] for line in lines]
        assert len(texts) > 1
        assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
        assert texts[-1] == alone

    def test_concurrent_requests(self):
        alone = [
            (text, self._stress_generate(stress._CONCURRENT_PREFIX + text, 12).lower())
            for text, _ in stress._CONCURRENT_QA
        ]
        assert len({answer for _, answer in alone}) > len(alone) // 2
        with mock.patch.object(stress, "_CONCURRENT_QA", alone):
            super().test_concurrent_requests()


class TestAbortAll(AbortAllMixin, OnServer):
    abort_all_num_requests = 24  # of which 16 run
    abort_all_max_new_tokens = 900

    def test_abort_all(self):
        super().test_abort_all()
        self.server.assert_idle_books()


class TestTimeouts(WaitingTimeoutMixin, RunningTimeoutTwoWaveMixin, OnTimedServer):
    """Lengths follow from the speed of this machine: too long to wait for, or to finish."""

    waiting_timeout_num_requests = 5  # of which 4 run
    running_timeout_num_wave1 = 2
    running_timeout_num_wave2 = 2

    def _tokens_in(self, seconds):
        """Tokens that four requests at once get in this time, by a sample."""
        prompt = words("speed", 8)
        wanted = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        started = time.monotonic()
        answer = self.server.post(
            "/generate", {"input_ids": [prompt] * 4, "sampling_params": wanted}
        )
        assert answer.status_code == 200, answer.text
        return int(seconds * 24 / (time.monotonic() - started))

    def test_waiting_timeout(self):
        self.waiting_timeout_max_new_tokens = self._tokens_in(2 * WAITING_S)
        super().test_waiting_timeout()
        self.server.assert_idle_books()

    def test_running_timeout_no_crash(self):
        self.running_timeout_max_new_tokens = self._tokens_in(2 * RUNNING_S)
        super().test_running_timeout_no_crash()
        self.server.assert_idle_books()


class BranchingByIds(PrefixCacheBranchingMixin):
    cache_chunk_size = 64

    @classmethod
    def send_request_helper(cls, text):
        ids = dict(zip(("hi", "this", "here", "that"), words("branching", 4), strict=True))
        prompt = []
        while text:
            word = next(word for word in ids if text.startswith(word))
            prompt.append(ids[word])
            text = text[len(word) :]
        answer = requests.post(
            cls.base_url + "/generate",
            json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}},
            timeout=120,
        )
        return answer.json()


class TestBranching(BranchingByIds, OnTimedServer):
    """Without opportunistic states exactly as the kit has it: miss, miss, hit."""


class TestBranchingAtLeastAsGood(BranchingByIds, OnServer):
    """With them the second request hits already, at the same depth."""

    def test_prefix_cache_branching(self):
        self.flush_cache()
        depths = [
            self.send_request_helper("hi" * 257 + word * 64)["meta_info"]["cached_tokens"]
            for word in ("this", "here", "that")
        ]
        assert depths == [0, 256, 256]


class TestRadixTree(OnServer):
    def test_radix_attention(self):
        drawn = random.Random(1)
        with mock.patch.object(radix_cache_server_kit, "random", drawn):
            nodes = radix_cache_server_kit.gen_radix_tree(num_nodes=40, chunk_len=24)
        first, count = vocabulary().words.start, len(vocabulary().words)
        for node in nodes:
            node["input_ids"] = [first + token % count for token in node["input_ids"]]
            node["decode_len"] = min(node["decode_len"], 24)
        with mock.patch.object(radix_cache_server_kit, "gen_radix_tree", return_value=nodes):
            radix_cache_server_kit.run_radix_attention_test(self.base_url)
        self.server.assert_idle_books()


class TestCacheHit(OnServer):
    def test_multiturn(self):
        dataset = self._dataset()
        found = cache_hit_kit.run_multiturn_cache_hit_test(
            self.base_url,
            self.model,
            num_clients=4,
            num_rounds=3,
            request_length=48,
            output_length=8,
            dataset_path=str(dataset),
        )
        assert found["overall"]["cache_hit_rate"] > 0.5

    def _dataset(self):
        """Conversations in ShareGPT's form: the kit would download that one."""
        tokens = vocabulary()
        spoken = [
            "".join(tokens.pieces[i].replace("Ġ", " ") for i in words(f"sharegpt {n}", 60))
            for n in range(40)
        ]
        turns = [{"conversations": [{"value": text}, {"value": text}]} for text in spoken]
        self.folder.joinpath("sharegpt.json").write_text(json.dumps(turns), "utf-8")
        return self.folder / "sharegpt.json"

    @pytest.fixture(autouse=True)
    def _in_folder(self, tmp_path):
        self.folder = tmp_path
