"""A small K3 made offline, and a chat that shows the cache at work on it.

`checkpoint` writes the model folder (config, seeded weights, tokenizer), `tokenizer` builds its
vocabulary, `tokenization_small_k3` is the chat format that travels inside the folder, `chat` plays
the conversation against a running server.
"""
