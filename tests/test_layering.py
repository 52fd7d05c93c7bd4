"""The arrows between the packages, and the size a file and a function may have.

sgl_kimi_k3 -> {radix, mempool}      radix, mempool: strangers, except in radix/sim
torch: mempool's storage and kernels, sgl_kimi_k3      sglang: sgl_kimi_k3, radix/sim's peer of it
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mempool", "radix", "sgl_kimi_k3")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 450, 70

# What each package may import of the guarded names; a longer prefix overrides a shorter one.
ALLOWED = {
    "mempool": {"mempool"},
    "mempool/storage.py": {"mempool", "torch"},
    "mempool/kernels.py": {"mempool", "torch", "triton"},
    "radix": {"radix"},
    "radix/sim": {"radix", "mempool"},
    "radix/sim/peers/sglang.py": {"radix", "mempool", "sglang", "torch"},
    "radix/sim/peers/sglang_arena.py": {"radix", "mempool", "sglang", "torch"},
    "sgl_kimi_k3": {"sgl_kimi_k3", "radix", "mempool", "sglang", "torch", "triton"},
    "sgl_kimi_k3/dashboard": {"sgl_kimi_k3"},
    "sgl_kimi_k3/demo": {"sgl_kimi_k3"},
    "sgl_kimi_k3/top.py": {"sgl_kimi_k3"},
}
GUARDED = {"mempool", "radix", "sgl_kimi_k3", "torch", "sglang", "triton"}

# Imports every pure module with torch and sglang blocked.
IMPORT_ALL = """
import importlib, sys
blocked = {"torch", "sglang", "triton"}
sys.modules.update(dict.fromkeys(blocked))  # None makes an import fail
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def relative(path):
    return path.relative_to(ROOT).as_posix()


def allowed(path):
    """The rule of the longest prefix of the path."""
    rules = [prefix for prefix in ALLOWED if f"{relative(path)}/".startswith(f"{prefix}/")]
    return ALLOWED[max(rules, key=len)]


def imported(tree):
    """Top-level names of every import, inside functions too, `if TYPE_CHECKING` excepted."""
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for part in block.body
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield (node.module or "").split(".")[0]


def test_pure_packages_import_without_torch_and_sglang():
    modules = [
        relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in SOURCES
        if not allowed(path) & {"torch", "sglang", "sgl_kimi_k3"} and path.name != "__main__.py"
    ]
    assert {"mempool", "mempool.pool", "radix", "radix.cache"} <= set(modules)
    subprocess.run([sys.executable, "-c", IMPORT_ALL, *modules], check=True, cwd=ROOT)


def test_the_block_blocks():
    """Without this, the test above would pass if the blocker were broken."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, "mempool.storage"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert "ModuleNotFoundError: import of torch halted" in result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_down(path):
    found = set(imported(ast.parse(path.read_text("utf-8")))) & GUARDED
    assert found <= allowed(path), f"{relative(path)} imports {sorted(found - allowed(path))}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_is_read_in_one_sitting_and_a_function_fits_a_screen(path):
    text = path.read_text("utf-8")
    lines = text.count("\n")
    assert lines <= FILE_LINES, f"{relative(path)} has {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{relative(path)}: {node.name} has {length} lines"


def test_every_source_has_a_rule_of_its_own_package():
    """A new top-level package must be given its arrows here."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests"} == set(PACKAGES)
