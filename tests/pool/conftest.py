"""Hypothesis profile of the state machine's long run: `--hypothesis-profile=pool-10k`."""

from hypothesis import settings

settings.register_profile("pool-10k", max_examples=10_000, deadline=None)
