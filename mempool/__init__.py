"""One byte arena: KDA states grow from one end, MLA KV blocks from the other."""

from mempool.geometry import Geometry, unit_bytes
from mempool.grant import Grant, Move
from mempool.ids import BlockId, IdArray, Side, SlotId, Step
from mempool.pool import Pool
from mempool.report import Counters, Report, SideReport
from mempool.table import Table

__all__ = [
    "BlockId",
    "Counters",
    "Geometry",
    "Grant",
    "IdArray",
    "Move",
    "Pool",
    "Report",
    "Side",
    "SideReport",
    "SlotId",
    "Step",
    "Table",
    "unit_bytes",
]
