"""The small K3's vocabulary: whole words that survive decoding, bytes for everything else.

A reply must come back as the same ids when a client returns its text, or the next turn's prompt
parts from the cached one inside the reply. So every token the model can sample is one English word
with its leading space. The pre-tokenizer splits before each such space, and a piece that is in the
vocabulary is one token (`ignore_merges`), so decoding and encoding any run of words is the
identity. Other text is spelled in bytes; those tokens, the format's tags and the control tokens are
only ever read (`checkpoint` gives them no chance to be sampled).

Ids: 256 bytes, the words, the format's tags, then 256 reserved ids laid out as in K3's vocabulary
([BOS] first, `<|end_of_msg|>` third, [PAD] last).
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

RESERVED = 256
_CONTROL = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
_TAGS = ("message", "think", "response", "tools", "call", "argument", "system", "user", "assistant")
_TAG_PIECES = (*_TAGS, "tool", "string", "Ġrole", "Ġtype", "Ġtool", "Ġindex", "Ġkey", '="')


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of the small K3's tokens.

    Attributes:
        pieces: byte-level spelling of each ordinary token; its id is its position.
        words: ids [first, last) of the words, the only tokens that are ever sampled.
    """

    pieces: tuple[str, ...]
    words: range

    @property
    def size(self) -> int:
        """Number of ids, the reserved ones included."""
        return len(self.pieces) + RESERVED

    def control(self, name: str) -> int:
        """Id of a control token such as `<|end_of_msg|>`."""
        offsets = {text: offset for offset, text in _CONTROL.items()}
        return len(self.pieces) + offsets[name]

    def reserved(self) -> list[str]:
        """Text of the reserved ids, in id order."""
        base = len(self.pieces)
        return [_CONTROL.get(i, f"<|reserved_token_{base + i}|>") for i in range(RESERVED)]


@functools.cache
def vocabulary() -> Vocabulary:
    """The vocabulary, from the word list shipped with this package."""
    listed = resources.files(__package__).joinpath("words.txt").read_text("utf-8").split()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{word}" for word in listed]
    tags = [piece for piece in _TAG_PIECES if piece not in words]
    pieces = (*alphabet, *words, *tags)
    assert len(set(pieces)) == len(pieces), "a word is listed twice"
    return Vocabulary(pieces, range(len(alphabet), len(alphabet) + len(words)))


def build() -> Tokenizer:
    """The tokenizer; the same bytes on every machine."""
    known = vocabulary()
    ids = {piece: i for i, piece in enumerate(known.pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in known.reserved()]
    )
    return tokenizer


def write(folder: Path) -> None:
    """Write the tokenizer files of a model folder: vocabulary, its class, its configuration."""
    source = resources.files(__package__).joinpath("tokenization_small_k3.py")
    (folder / "tokenization_small_k3.py").write_text(source.read_text("utf-8"), "utf-8")
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "SmallK3Tokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_small_k3.SmallK3Tokenizer"]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
