"""One byte arena: KDA states grow from one end, MLA KV blocks from the other."""
