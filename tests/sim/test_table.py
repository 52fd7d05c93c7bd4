"""The table: what it says of cells, and what it refuses."""

import json

from radix.sim.table import END, GB, START, main

RATES = {"ours": 0.6, "lru": 0.5, "vllm": 0.4, "clairvoyant": 0.7, "null": 0.0}


def test_known_cells_are_shown_and_not_run_again(tmp_path, capsys):
    """No trace is there, so running any cell would fail."""
    cells = [
        {"policy": name, "capacity_bytes": gb * GB, "token_hit_rate": rate, "interval": 0}
        for name, rate in RATES.items()
        for gb in (1, 2, 4, 8)
    ]
    cells[-1] = cells[-1] | {"capacity_bytes": GB}
    known, page = tmp_path / "cells.json", tmp_path / "page.md"
    known.write_text(json.dumps({"airline": {"cells": cells}}))
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    flags = ["--trace", "airline", "--policy", "ours,lru,vllm,clairvoyant,null"]
    assert main([str(tmp_path), *flags, "--json", str(known), "--write", str(page)]) == 0
    row = "| airline | 1 | 60.0 | 40.0 | 50.0 | 70.0 | 0.0 | +10.0 | 50 % |"
    assert row in capsys.readouterr().out
    text = page.read_text()
    assert row in text
    assert "50 % closed on average" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_unknown_names_are_refused(tmp_path, capsys):
    assert main([str(tmp_path), "--trace", "chess"]) == 2
    assert "--trace chess is unknown" in capsys.readouterr().err
    assert main([str(tmp_path), "--trace", "airline", "--policy", "best"]) == 2
    assert "--policy best is unknown" in capsys.readouterr().err
