"""What things are called, and what that means, on the page and in the terminal alike."""

from __future__ import annotations

# key -> (name, explanation). Parts of a prompt, in the order of the stack: what is well, what
# cannot be helped, what memory or more states could change.
PARTS = {
    "resumed": (
        "Resumed",
        "Not computed again: both KV and a state to go on from were in memory.",
    ),
    "new": ("New", "Nothing known went on from here: these tokens had not been seen here before."),
    "diverged": (
        "Diverged",
        "The prompt left what was known: the client changed the history or dropped the thinking.",
    ),
    "too_short": (
        "Always computed",
        "The last token of a prompt, a last block begun, and tokens whose logprobs were asked for.",
    ),
    "no_checkpoint": (
        "No state",
        "Known, but no state was kept near enough to go on from. A smaller interval helps.",
    ),
    "evicted": ("Evicted", "A state was here, but had to make room. More memory helps."),
    "refused": (
        "No room",
        "No memory to keep a state here, or to go on from it. More memory or fewer requests help.",
    ),
}
# Where a checkpoint sits.
KINDS = {
    "prompt_end": (
        "Prompt end",
        "Where a prompt ended: the same prompt sent again, or with more behind it, goes on here.",
    ),
    "turn_end": (
        "Turn end",
        "Where a reply ended: the next turn goes on here if it sends the reply back unchanged.",
    ),
    "interval": ("Interval", "At a regular distance in long prompts (--kimi-k3-interval)."),
    "junction": ("Junction", "Where prompts parted: the end of the prefix that they share."),
    "boundary": ("System messages", "Where the leading system messages end."),
    "opportunistic": (
        "Opportunistic",
        "Extra states while memory is free; the first to go (--kimi-k3-opportunistic).",
    ),
    "retract": ("Retracted", "Where a running request had to give its memory back."),
}
# Parts of the arena, as `view` has them; both sides' holes go by one name.
SEGMENTS = {
    "states_used": ("States in use", "KDA states of running requests, and those they protect."),
    "states_cached": (
        "States cached",
        "Checkpoints that nothing protects: eviction could free them now.",
    ),
    "gap": ("Gap", "Free, for either side."),
    "kv_cached": ("KV cached", "KV that nothing protects: eviction could free it now."),
    "kv_used": ("KV in use", "KV of running requests, and the prefixes they protect."),
    "holes": (
        "Holes",
        "Freed places between used ones: filled first, or closed by moving data.",
    ),
    "sink": ("Reserved", "Where padding is written, and what alignment costs."),
}
ALL = {"PARTS": PARTS, "KINDS": KINDS, "SEGMENTS": SEGMENTS}
