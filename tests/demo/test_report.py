"""The chat's checks: what counts as resumed where it should, what the JSON holds."""

import json

import pytest

from sgl_kimi_k3.demo import report
from sgl_kimi_k3.demo.report import Turn

END = 99
SYSTEM = (*range(100, 140), END)  # 41 tokens shared by all users


def turn(user, number, prompt, output, cached):
    return Turn(tuple(prompt), tuple(output), cached, 0.5, user, number)


def chat(*, second_user=41, second_turn=45):
    first = turn(1, 1, (*SYSTEM, 1, 2, END), (7, 8), 0)
    other = turn(2, 1, (*SYSTEM, 1, 3, END), (7, 9), second_user)
    after = turn(1, 2, (*first.prompt_ids, 7, 8, 5, END), (7, 7), second_turn)
    return [first, other, after]


def test_a_chat_that_resumed_everywhere():
    assert report.resume_problems(chat(), END, grid=4) == []


def test_within_one_grid_step_is_enough_and_one_token_less_is_not():
    # 44 prompt tokens and one fed reply token: the previous turn ended at 45
    assert report.resume_problems(chat(second_turn=41), END, grid=4) == []
    (problem,) = report.resume_problems(chat(second_turn=40), END, grid=4)
    assert problem == "user 1 turn 2: resumed at 40, should be within 4 tokens of 45"


def test_the_shared_part_ends_with_its_last_whole_message():
    (problem,) = report.resume_problems(chat(second_user=36), END, grid=4)
    assert problem == "user 2 turn 1: resumed at 36, should be within 4 tokens of 41"


def test_a_prompt_that_does_not_repeat_the_previous_turn_is_named():
    first, other, after = chat()
    edited = turn(1, 2, (*first.prompt_ids, 6, 8, 5, END), (7, 7), 44)
    (problem,) = report.resume_problems([first, other, edited], END, grid=4)
    assert problem == "user 1 turn 2: the prompt parts from the previous turn at 44 of 45 tokens"
    assert after.prompt_ids != edited.prompt_ids


def test_differences_name_the_first_position():
    left, right = chat(), chat()
    right[1] = turn(2, 1, right[1].prompt_ids, (7, 4), 41)
    assert report.differences(left, left) == []
    assert report.differences(left, right) == [
        "user 2 turn 1: sampled tokens differ from position 1 of the reply on"
    ]


def test_a_shorter_reply_is_a_difference():
    left, right = chat(), chat()
    right[0] = turn(1, 1, right[0].prompt_ids, (7,), 0)
    assert len(report.differences(left, right)) == 1


def test_hit_rate_is_a_ratio_of_sums():
    turns = [turn(1, 1, range(1000), (1,), 900)] + [turn(2, 1, range(10), (1,), 0)] * 9
    assert report.hit_rate(turns) == pytest.approx(900 / 1090)


def test_json_has_what_the_readme_promises(tmp_path):
    info = {"version": "0.5.23", "radix_cache_backend": "kimi_k3"}
    metrics = (
        "# HELP kimi_k3:arena_bytes x\n"
        'kimi_k3:arena_bytes{engine_type="unified",part="states",tp_rank="0"} 4096.0\n'
        'kimi_k3:arena_bytes{part="kv"} 1.5e+06\n'
        'other:arena_bytes{part="kv"} 7.0\n'
    )
    path = tmp_path / "out.json"
    server = report.server_summary(info, metrics)
    report.write_json(path, chat(), outputs_equal=True, server=server)
    assert json.loads(path.read_text()) == {
        "hit_rate": round((41 + 45) / (44 + 44 + 48), 4),
        "outputs_equal": True,
        "turns": [
            {"user": 1, "turn": 1, "prompt_tokens": 44, "cached_tokens": 0, "ttft_s": 0.5},
            {"user": 2, "turn": 1, "prompt_tokens": 44, "cached_tokens": 41, "ttft_s": 0.5},
            {"user": 1, "turn": 2, "prompt_tokens": 48, "cached_tokens": 45, "ttft_s": 0.5},
        ],
        "server": {
            "sglang_version": "0.5.23",
            "radix_cache": "kimi_k3",
            "pool": {"name": "mempool", "bytes": {"states": 4096, "kv": 1500000}},
        },
    }


def test_a_server_without_our_pool_is_called_by_its_name():
    assert report.server_summary({}, "")["pool"] == {"name": "sglang"}
