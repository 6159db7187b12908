"""What a sublayer of a transformer holds on one of N ranks, as the sequence-parallel paper counts it (Li et al. 2021,
tables 1 and 2): in elements of one precision, of weights four (themselves, gradients, Adam's two moments).

An MLP has 8 H^2 weights, so 32 H^2; attention 4 A Z H, so 16 A Z H. Of activations the inputs of matrices and of
softmax are counted, and what tensor parallelism replicates is its input, BLH. Subtracted:

    MLP:        sequence - tensor = (1 - 1/N) (32 H^2 - B L H)
    attention:  sequence - tensor = (1 - 1/N) (16 A Z H - B L H)

so that for every N > 1 sequence parallelism holds less from BL = 32 H on (MLP), and from BL = 16 A Z on (attention).
The simulator's and the runtime's own count differs: biases are weights too, norms keep a second BLH, and ring attention
a copy of keys and values.

Letters: B sequences, L tokens of each, H hidden, Z heads, A head size.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class PublishedSizes:
    """Of one sublayer and micro-batch.

    Args:
        ranks: N >= 1, of the tensor or sequence group.
    """

    sequences: int
    tokens: int
    hidden: int
    heads: int
    head_size: int
    ranks: int

    def mlp(self, *, sequence: bool) -> Fraction:
        """Elements of a rank; `sequence`: of sequence parallelism, else of tensor parallelism."""
        weights = 32 * self.hidden**2
        if sequence:
            return weights + Fraction(5 * self._blh, self.ranks)
        return Fraction(weights + 4 * self._blh, self.ranks) + self._blh

    def attention(self, *, sequence: bool) -> Fraction:
        """As `mlp`; scores [L, L] of each head are kept."""
        wide = self.heads * self.head_size
        weights, inner = 16 * wide * self.hidden, 4 * self.sequences * self.tokens * wide
        scores = self.sequences * self.heads * self.tokens**2
        if sequence:
            return weights + Fraction(inner + scores + self._blh, self.ranks)
        return Fraction(weights + inner + scores, self.ranks) + self._blh

    @property
    def _blh(self) -> int:
        return self.sequences * self.tokens * self.hidden
