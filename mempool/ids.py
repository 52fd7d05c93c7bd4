"""The integers of the pool: what an id, an index, a position and a step are.

- id: virtual, what callers hold; ids start at 1, id 0 is the sink and is never handed out;
- index: physical, what kernels read; index 0 is the sink;
- position: an index counted from its own end of the arena, so both ends share one code.
"""

from enum import Enum
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
Step = NewType("Step", int)
IdArray = npt.NDArray[np.int64]

FEW: Final = 8  # up to here a loop over plain ints beats a numpy call per step
SOME: Final = 128  # up to here list and set builtins beat numpy reductions
_INT64 = np.dtype(np.int64)
EMPTY: IdArray = np.empty(0, dtype=np.int64)
EMPTY.flags.writeable = False


class Side(Enum):
    """One of the two kinds of memory; the value is the word that reports use."""

    STATE = "state"
    BLOCK = "block"


def as_ids(ids: npt.ArrayLike) -> IdArray:
    """Return `ids` as a 1-D int64 array; floats, bools and other shapes are a ValueError."""
    if isinstance(ids, np.ndarray) and ids.dtype is _INT64 and ids.ndim == 1:
        return ids
    array = np.asarray(ids)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"ids must be integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"ids must be one-dimensional, got shape {array.shape}")
    return array.astype(np.int64)
