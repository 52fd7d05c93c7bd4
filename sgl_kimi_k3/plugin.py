"""SGLang's entry point (`sglang.srt.plugins`)."""


def load() -> None:
    """Register everything this package adds to SGLang; called once in every SGLang process."""
