"""Prompts as token ids: words of the small K3's vocabulary, repeatable from a seed."""

import random

from sgl_kimi_k3.demo.tokenizer import vocabulary


def words(seed: object, count: int) -> list[int]:
    """`count` ids; different seeds share no prefix in practice."""
    return random.Random(f"{seed}").choices(vocabulary().words, k=count)
