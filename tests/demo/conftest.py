import pytest

from sgl_kimi_k3.demo import tokenizer
from sgl_kimi_k3.demo.tokenization_small_k3 import SmallK3Tokenizer


@pytest.fixture(scope="session")
def small_k3() -> SmallK3Tokenizer:
    return SmallK3Tokenizer(
        tokenizer_object=tokenizer.build(),
        bos_token="[BOS]",
        eos_token="[EOS]",
        pad_token="[PAD]",
        unk_token="[UNK]",
    )
