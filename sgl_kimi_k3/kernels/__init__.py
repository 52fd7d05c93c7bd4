"""K3's operators in plain torch: `naive` is the truth, the others are what the CPU runs.

Two rules make a row's result independent of the batch it stands in, so that a cached and an
uncached run of one prompt give the same tokens:

1. A product with a weight always runs in blocks of the same shape (`tiles`).
2. Everything else is computed in float64 and rounded once, so that neither the vector width nor
   the order of a sum shows in the result.
"""
