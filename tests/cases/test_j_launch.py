"""cases.md J2: constraints between page, grid, interval and context parallelism, at launch."""

from __future__ import annotations

import pytest

from sgl_kimi_k3 import context_parallel, resolution
from sgl_kimi_k3.config import Options
from tests.plugin.test_cli import View

# page, kernel chunk and grid, interval, dcp -> what the refusal names; None: accepted
TABLE = [
    ((64, 64, 128, 1), None),
    ((128, 128, 128, 1), None),
    ((1, 64, 64, 1), None),
    ((64, 64, 96, 1), ["KIMI_K3_INTERVAL=96", "KIMI_K3_GRID=64", "64 and 128"]),
    ((64, 64, 128, 8), ["--page-size 64", "--dcp-size 8", "512 tokens", "KIMI_K3_GRID=512"]),
    ((64, 512, 1024, 8), None),
    # The kernel's chunk of 64 does not bind a page of 128, the grid does; the fix is named.
    ((128, 64, 128, 1), ["--page-size 128", "KIMI_K3_GRID=64", "KIMI_K3_GRID=128"]),
]


@pytest.mark.parametrize(("values", "named"), TABLE)
def test_j2_what_does_not_divide_is_refused_at_launch(values, named, monkeypatch) -> None:
    page, grid, interval, dcp = values
    view = View()
    view.page_size, view.dcp_size = page, dcp
    options = {"KIMI_K3_GRID": str(grid), "KIMI_K3_INTERVAL": str(interval)}
    options["KIMI_K3_OPPORTUNISTIC"] = "0"
    for name, value in options.items():
        monkeypatch.setenv(name, value)

    def launch() -> None:
        resolution.refuse_unsupported(view)
        if dcp > 1:
            context_parallel.check_sizes(view)

    if named is None:
        launch()
        assert Options.from_env(options).interval == interval
        return
    with pytest.raises(ValueError) as caught:
        launch()
    assert all(word in str(caught.value) for word in named), caught.value
