"""Options of the backend: environment variables `KIMI_K3_*`, read once per process.

SGLang 0.5.23 has no seam for new server flags, so options travel by environment;
`sgl-kimi-k3 serve` sets them, and every scheduler process inherits the same values.
Imports neither torch nor sglang.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

BACKEND = "kimi_k3"  # the value of --radix-cache-backend
PREFIX = "KIMI_K3_"

# Of SGLang, for those who must not import it.
FULL_K3 = "KimiK3ForConditionalGeneration"
K3_SPREAD_PAGES = (32, 64)  # trtllm_mla's and cutedsl_mla's, its kernels under DCP
SPREAD_KERNEL = "flashinfer"  # under DCP, for other classes


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator can set.  Lengths are in tokens.

    Attributes:
        interval: distance between checkpoints that are kept on the grid; 0 switches them off.
        grid: depths of interval, junction and opportunistic checkpoints are multiples of this.
        opportunistic: distance between extra checkpoints taken while memory is free or held by
            older ones that nobody used, where each costs a cut; on CUDA they stand on the grid;
            0 = off.
        probation: on CUDA, one in so many states is for the youngest extra ones, which nobody has
            used yet, also when memory is short; 0 = none.
        ghost_tokens: bound on tokens remembered without bytes, the evidence for a second sight.
        overtake: under overload, admissions that may pass a request which resumes little, before
            its room is taken from others that will come back soon; 0 = strictly in order.
        boundaries: `auto` keeps a state at the end of the leading system messages when the
            tokenizer has K3's control tokens; `off` ignores messages.
        check: recount pool and tree from scratch whenever the scheduler is idle, and stop on a
            difference.  For tests: it takes seconds on a GPU's arena.
        explain: say for every request, in the log and in `/server_info`, what was computed and why.
        trace: file that receives one line per request in the simulator's format; empty = off.
        model: `auto` uses the portable model where CUDA is absent, `portable` always.
    """

    interval: int = 32768
    grid: int = 64
    opportunistic: int = 4096
    probation: int = 16
    ghost_tokens: int = 16_777_216
    overtake: int = 16
    boundaries: str = "auto"
    check: bool = False
    explain: bool = False
    trace: str = ""
    model: str = "auto"

    def __post_init__(self) -> None:
        """Refuse values that cannot work, naming the variable, the value and the fix."""
        if self.grid < 1:
            raise ValueError(f"{PREFIX}GRID={self.grid}: must be at least 1 token")
        for name in ("interval", "opportunistic"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{PREFIX}{name.upper()}={value}: must be 0 (off) or positive")
            if value % self.grid:
                low = value // self.grid * self.grid
                raise ValueError(
                    f"{PREFIX}{name.upper()}={value} is no multiple of {PREFIX}GRID={self.grid}; "
                    f"the nearest are {low} and {low + self.grid}"
                )
        if self.overtake < 0:
            raise ValueError(f"{PREFIX}OVERTAKE={self.overtake}: must be 0 (off) or positive")
        if self.probation < 0:
            raise ValueError(f"{PREFIX}PROBATION={self.probation}: must be 0 (off) or positive")
        if self.ghost_tokens < 0:
            raise ValueError(f"{PREFIX}GHOST_TOKENS={self.ghost_tokens}: must not be negative")
        _one_of("boundaries", self.boundaries, ("auto", "off"))
        _one_of("model", self.model, ("auto", "portable"))

    def as_dict(self) -> dict[str, int | str | bool]:
        """By name without prefix."""
        return asdict(self)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Options:
        """Read `KIMI_K3_<NAME>`; an unknown `KIMI_K3_` variable or a bad value is a ValueError."""
        known = {f"{PREFIX}{field.name.upper()}": field for field in fields(cls)}
        unknown = sorted(key for key in env if key.startswith(PREFIX) and key not in known)
        if unknown:
            raise ValueError(f"{unknown[0]} is not an option; options: {', '.join(sorted(known))}")
        values: dict[str, int | str | bool] = {}
        for key, field in known.items():
            if key in env:
                values[field.name] = _parse(key, env[key], type(field.default))
        return cls(**values)  # type: ignore[arg-type]  # each value has its field's own type


def _parse(key: str, text: str, kind: type) -> int | str | bool:
    if kind is bool:
        if text not in {"0", "1"}:
            raise ValueError(f"{key}={text!r}: must be 0 or 1")
        return text == "1"
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{key}={text!r}: must be a whole number") from None
    return text


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{PREFIX}{name.upper()}={value!r}: must be one of {', '.join(allowed)}")
