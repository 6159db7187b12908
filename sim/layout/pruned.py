"""A block's product over the columns that a rank keeps (SEMI: resized GEMMs), and what keeping them costs.

As `kernels.pruned` does it on CPUs: forward copies the kept columns of both operands, which backward keeps; each
gradient goes back to its places in one pass, and what was left out is imputed in the same one. (Its kernels for GPUs
read and write through indices and copy nothing: there this counts too much.)
"""

from dataclasses import replace

from ...policies.balance import Product
from ..balance.columns import ColumnShare
from ..balance.share import Share
from .operands import LocalStep, Operand


def pruned(
    step: LocalStep, share: Share | ColumnShare, product: Product, *, backward: bool
) -> tuple[LocalStep, int, int]:
    """One of the three products of a matrix; (the smaller one, bytes of copies around it, kernels that copy).

    Shapes: forward [.., K] by [N, K] to [.., N]; backward [.., N] by [N, K] to [.., K], and [.., N] by [.., K] to
    [N, K]. Of K columns some are left out.
    """
    assert step.product is not None
    columns = step.reads[1].shape[-1]
    kept = share.kept(product, columns)
    if kept == columns:
        return step, 0, 0
    if backward:
        reads = (step.reads[0], _cut(step.reads[1], kept))
        writes = tuple(_cut(made, kept) for made in step.writes)
        # what was made is read, and all columns are written
        copies = sum(made.nbytes for made in (*writes, *step.writes))
        matmul = replace(step.product, n=kept)
    else:
        reads = (_cut(step.reads[0], kept), _cut(step.reads[1], kept))
        writes = step.writes
        copies = 2 * sum(operand.nbytes for operand in reads)
        matmul = replace(step.product, k=kept)
    nbytes = sum(operand.nbytes for operand in (*reads, *writes))
    made_step = replace(step, nbytes=nbytes, reads=reads, writes=writes, product=matmul)
    return made_step, copies, 1 if backward else 2


def _cut(operand: Operand, columns: int) -> Operand:
    return replace(operand, shape=(*operand.shape[:-1], columns))
