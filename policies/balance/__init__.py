"""Balancing policies: what ranks that share work do when some of them are slow."""

from .assignment import Assignment, kept_columns, moves
from .movement import LEND_STREAM, MEASURE_STREAM, RETURN_STREAM, lend_plans, return_plans
from .policy import (
    BalanceAction,
    BalanceEvent,
    BalancePolicy,
    ChangesMeasured,
    GroupMeasured,
    Half,
    Migrate,
    MovementTimed,
    Prune,
    describe_balance_actions,
    describe_balance_event,
    is_balance_event,
    parse_balance_event,
)
from .shares import ReplicasMeasured, ShareBlocks, ShareSequences, StagesMeasured, replica_ns
from .work import BlockWork, Product, block_work

__all__ = [
    "LEND_STREAM",
    "MEASURE_STREAM",
    "RETURN_STREAM",
    "Assignment",
    "BalanceAction",
    "BalanceEvent",
    "BalancePolicy",
    "BlockWork",
    "ChangesMeasured",
    "GroupMeasured",
    "Half",
    "Migrate",
    "MovementTimed",
    "Product",
    "Prune",
    "ReplicasMeasured",
    "ShareBlocks",
    "ShareSequences",
    "StagesMeasured",
    "block_work",
    "describe_balance_actions",
    "describe_balance_event",
    "is_balance_event",
    "kept_columns",
    "lend_plans",
    "moves",
    "parse_balance_event",
    "replica_ns",
    "return_plans",
]
