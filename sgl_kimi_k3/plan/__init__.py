"""`sgl-kimi-k3 plan`: what a model, a GPU and a kind of traffic need, before anything is started.

Reads a `config.json`, never weights, and imports neither torch nor SGLang.

- `model`: the sizes in a config, and how heavy its weights are on one rank.
- `traffic`: a turn profile or a trace, as requests of the simulator.
- `capacity`: what fits into one rank's arena.
- `command`: arguments, the `serve` line to use, table and JSON.
"""
