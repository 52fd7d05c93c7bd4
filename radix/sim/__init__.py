"""Replay of recorded traffic through the server's own tree and pool, beside other policies.

`python -m radix.sim TRACE`; `README.md` beside this file says what a cell means.
"""
