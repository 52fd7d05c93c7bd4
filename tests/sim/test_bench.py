"""The benchmark of the tree runs, on a tree so small that its figures mean nothing."""

from tests.bench.radix import measure


def test_every_figure_is_there():
    figures = measure(sizes=(1024, 4096), nodes=40)
    for name in ("cycle", "match"):
        assert [row["tokens"] for row in figures[name]] == [1024, 4096]
        for row in figures[name]:
            assert row["ratio"] == round(row["ours_us"] / row["sglang_us"], 3)
    assert set(figures["cycle"][0]["ours"]) == {"match", "commit", "evict"}
    assert [row["tokens"] for row in figures["pool"]] == [1024, 4096]
    assert all(row["ours_us"] > 0 < row["unified_us"] for row in figures["pool"])
    assert figures["sglang_core"] in {"RustUnifiedTreeCore", "UnifiedTreeCore"}
    assert figures["nodes"] == 40
