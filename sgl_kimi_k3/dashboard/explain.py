"""A request's numbers as a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a checkpoint of each kind is the end of, or why it was kept.
KINDS = {
    "prompt_end": "the end of an earlier prompt",
    "turn_end": "the end of an earlier reply",
    "interval": "a state kept at regular distance",
    "junction": "a point where earlier prompts parted",
    "boundary": "the end of the system messages",
    "opportunistic": "a state kept while memory was free",
    "retract": "where the request was interrupted",
}
LOSSES = {
    "evicted": "{n} were known, but their state had been evicted",
    "refused": "{n} were known, but there had been no memory to keep a state",
    "no_checkpoint": "{n} were known, but no state was kept close enough",
    "diverged": "{n} follow a point where this prompt left what was known",
    "new": "{n} were new",
    "too_short": "{n} at the end are always computed",
}


def explained(row: Mapping[str, Any]) -> str:
    """Of one row of `requests` in the `kimi_k3` block of `/server_info`.

    >>> explained({"prompt_tokens": 40, "resumed": 32, "kind": "turn_end", "lost": {"new": 8}})
    '32 of 40 tokens resumed from the end of an earlier reply; 8 were new.'
    """
    resumed, prompt = row["resumed"], row["prompt_tokens"]
    kind = KINDS.get(row["kind"], f"a {row['kind']} state")
    first = f"{resumed:,} of {prompt:,} tokens resumed from {kind}"
    if not resumed:
        first = f"None of {prompt:,} tokens resumed"
    rest = [
        LOSSES.get(reason, "{n} were computed: " + reason).format(n=f"{tokens:,}")
        for reason, tokens in row["lost"].items()
        if tokens
    ]
    return "; ".join([first, *rest]) + "."
