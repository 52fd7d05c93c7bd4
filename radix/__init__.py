"""Which prefixes and which states to keep."""

from radix.cache import PrefixCache
from radix.eviction import ConsumedLru, EvictionPolicy
from radix.expected_loss import ExpectedLoss
from radix.lease import Lease, admit
from radix.ports import GrantLike, PoolPort
from radix.report import Cause, Loss, Report
from radix.returns import Returns, needed_by
from radix.tokens import IdArray, TokenArray
from radix.turnstile import Turnstile, Waiting
from radix.values import CacheConfig, Commit, Costs, Kind, Match, Pin, SlotId, Stop

__all__ = [
    "CacheConfig",
    "Cause",
    "Commit",
    "ConsumedLru",
    "Costs",
    "EvictionPolicy",
    "ExpectedLoss",
    "GrantLike",
    "IdArray",
    "Kind",
    "Lease",
    "Loss",
    "Match",
    "Pin",
    "PoolPort",
    "PrefixCache",
    "Report",
    "Returns",
    "SlotId",
    "Stop",
    "TokenArray",
    "Turnstile",
    "Waiting",
    "admit",
    "needed_by",
]
