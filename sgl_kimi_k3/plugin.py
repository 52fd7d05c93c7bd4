"""SGLang's entry point (`sglang.srt.plugins`), called once in every SGLang process.

SGLang logs an exception raised here and carries on, so a failure must surface where it cannot be
overlooked: the backend's factory is registered in any case, and refuses with the reason.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from sgl_kimi_k3 import compat, hooks
from sgl_kimi_k3.config import BACKEND, Options

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def load() -> None:
    """Check SGLang, register the hooks, the portable model and the cache backend."""
    try:
        compat.check_version()
    except compat.IncompatibleError as error:
        _register_backend(_refuse(str(error)))
        raise
    _register_backend(make_cache)
    hooks.register()
    from sgl_kimi_k3.models import register_portable  # noqa: PLC0415  # imports torch

    register_portable()


def make_cache(context: Any) -> Any:
    """The factory behind `--radix-cache-backend kimi_k3`; runs in each scheduler process.

    Raises:
        IncompatibleError: SGLang is not the expected one, or a hook did not take.
        ValueError: a `KIMI_K3_*` option or the model does not fit.
    """
    compat.check()
    compat.check_own_packages()
    lost = hooks.missing()
    if lost:
        raise compat.IncompatibleError(
            f"SGLang did not apply the hook on {', '.join(lost)}: "
            "is `kimi_k3` left out of SGLANG_PLUGINS?"
        )
    options = Options.from_env(os.environ)
    from sgl_kimi_k3.build import build_cache  # noqa: PLC0415  # the scheduler's imports

    return build_cache(context, options)


def _register_backend(factory: Callable[[Any], Any]) -> None:
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415

    register_radix_cache_backend(BACKEND, factory)


def _refuse(reason: str) -> Callable[[Any], Any]:
    def factory(_context: Any) -> Any:
        raise compat.IncompatibleError(reason)

    return factory
