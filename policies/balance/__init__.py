"""Balancing policies: what ranks that share work do when some of them are slow."""

from .assignment import Assignment, kept_columns, moves
from .build import balanced_work, build_balance
from .movement import (
    LEND_STREAM,
    MEASURE_STREAM,
    RETURN_STREAM,
    lend_plans,
    pretest_moves,
    return_plans,
)
from .policy import (
    BalanceAction,
    BalanceEvent,
    BalancePolicy,
    ChangesMeasured,
    ColumnsTimed,
    GroupMeasured,
    Half,
    Leg,
    Migrate,
    MovementTimed,
    ProductsTimed,
    Prune,
    describe_balance_actions,
    describe_balance_event,
    is_balance_event,
    parse_balance_event,
)
from .product_cost import FEW_KEPT, KEPT, sizes_of
from .shares import ReplicasMeasured, ShareBlocks, ShareSequences, StagesMeasured, replica_ns
from .split import least_room_bytes
from .work import BlockWork, Product, block_work, column_work

__all__ = [
    "FEW_KEPT",
    "KEPT",
    "LEND_STREAM",
    "MEASURE_STREAM",
    "RETURN_STREAM",
    "Assignment",
    "BalanceAction",
    "BalanceEvent",
    "BalancePolicy",
    "BlockWork",
    "ChangesMeasured",
    "ColumnsTimed",
    "GroupMeasured",
    "Half",
    "Leg",
    "Migrate",
    "MovementTimed",
    "Product",
    "ProductsTimed",
    "Prune",
    "ReplicasMeasured",
    "ShareBlocks",
    "ShareSequences",
    "StagesMeasured",
    "balanced_work",
    "block_work",
    "build_balance",
    "column_work",
    "describe_balance_actions",
    "describe_balance_event",
    "is_balance_event",
    "kept_columns",
    "least_room_bytes",
    "lend_plans",
    "moves",
    "parse_balance_event",
    "pretest_moves",
    "replica_ns",
    "return_plans",
    "sizes_of",
]
