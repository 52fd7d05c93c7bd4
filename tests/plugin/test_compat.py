"""The contract with SGLang: the installed wheel is the authority."""

import importlib.metadata
import subprocess
import sys
import types

import pytest
from sglang.srt.mem_cache.registry import get_radix_cache_factory

from sgl_kimi_k3 import compat, hooks, plugin


def test_the_installed_sglang_fits() -> None:
    compat.check()


def test_every_hooked_target_is_in_the_contract() -> None:
    assert {hook.target for hook in hooks.HOOKS} <= set(compat.SYMBOLS)


def test_sglangs_kda_prefill_is_as_we_hook_it() -> None:
    compat.check_symbols(compat.PASS_SYMBOLS)
    assert {hook.target for hook in hooks.PASS_HOOKS} <= set(compat.PASS_SYMBOLS)


def test_sglangs_kda_verifies_as_we_call_it() -> None:
    compat.check_symbols(compat.VERIFY_SYMBOLS)
    assert {hook.target for hook in hooks.VERIFY_HOOKS} <= set(compat.VERIFY_SYMBOLS)
    assert {hook.target for hook in hooks.DRAFT_HOOKS} <= set(compat.DRAFT_SYMBOLS)


def test_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.24")
    with pytest.raises(compat.IncompatibleError) as caught:
        compat.check()
    assert str(caught.value) == (
        "sgl-kimi-k3 needs sglang 0.5.23, found 0.5.24: pip install sglang==0.5.23"
    )


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.mem_cache.registry.register_radix_cache_backend"
    monkeypatch.setitem(compat.SYMBOLS, name, ("name", "factory", "extra"))
    with pytest.raises(compat.IncompatibleError, match="register_radix_cache_backend takes"):
        compat.check_symbols()


def test_a_missing_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.SYMBOLS, "sglang.srt.mem_cache.registry.gone", None)
    with pytest.raises(compat.IncompatibleError, match=r"lacks \S+registry\.gone"):
        compat.check_symbols()


def test_foreign_packages_of_the_same_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = types.ModuleType("radix")
    foreign.__path__ = ["elsewhere"]
    monkeypatch.setitem(sys.modules, "radix", foreign)
    with pytest.raises(compat.IncompatibleError, match="'radix' at"):
        compat.check_own_packages()


def test_the_factory_refuses_when_a_hook_did_not_take() -> None:
    """Here the plugin was never loaded, so no hook is applied."""
    assert hooks.missing() == [hook.target for hook in hooks.HOOKS]
    with pytest.raises(compat.IncompatibleError, match="did not apply the hook on"):
        plugin.make_cache(None)


def test_a_failed_load_leaves_a_factory_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import registry

    monkeypatch.setattr(registry, "_RADIX_CACHE_REGISTRY", {})
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6")
    with pytest.raises(compat.IncompatibleError):
        plugin.load()
    factory = get_radix_cache_factory("kimi_k3")
    assert factory is not None
    with pytest.raises(compat.IncompatibleError, match=r"found 0\.6"):
        factory(None)


def test_loading_the_plugin_takes_every_hook() -> None:
    script = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sgl_kimi_k3 import hooks; print(hooks.missing())\n"
        "from sglang.srt.mem_cache.registry import registered_radix_cache_backends\n"
        "print('kimi_k3' in registered_radix_cache_backends())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert result.stdout.splitlines()[-2:] == ["[]", "True"]
