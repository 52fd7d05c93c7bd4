"""Watching one server: samples of its endpoints, what they say over a window, a page to show it.

sample  (one reading)  ->  history (readings, counters that never fall)  ->  view (plain JSON)
                                   ^                                            |
watcher (asks the server, knows whether it answers)           app (web page), ../top.py (text)

Imports neither torch nor sglang: it runs on a laptop that watches a server elsewhere.
"""
