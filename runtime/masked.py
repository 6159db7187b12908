"""Masked tokens to train on: what a BERT is to tell from its surroundings.

Imports no torch, as `data`.
"""

from typing import Final

import numpy as np

from .data import Batches, Tokens

NO_TARGET: Final = -100  # of a token that was not chosen (torch's own ignore_index)
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1  # of the tokens; of those that are chosen

_MASKS: Final = 2  # its streams of random numbers lie behind those of the texts


class MaskedBatches(Batches):
    """The micro-batches of one rank: tokens, some of them spoiled, and what those were.

    Sequences are those of `Batches`. Of each 15% of the tokens are chosen, rounded, at least one (as BERT's released
    code does: the number is the same in all sequences, so that a mean of ranks' means is the mean over all
    of their tokens). A chosen token becomes the mask's with a chance of 80%, one that is drawn from all others with
    10%, and else stays; its target is what it was, and the other targets are `NO_TARGET`. The choice follows from
    the seed and the sequence's number alone; a validation makes the same one every time.

    The mask is the last token of the vocabulary. Text and random tokens have none of it.
    """

    def row(self, stream: int, number: int) -> tuple[Tokens, Tokens]:
        told_T = self.random_row(stream, number)[:-1]
        random = np.random.default_rng((self.seed, _MASKS + stream, number))
        chosen_N = random.choice(len(told_T), max(1, round(_CHOSEN * len(told_T))), replace=False)
        targets_T = np.full_like(told_T, NO_TARGET)
        targets_T[chosen_N] = told_T[chosen_N]
        chance_N = random.random(len(chosen_N))
        drawn_N = random.integers(0, self.num_tokens, len(chosen_N))
        tokens_T = told_T.copy()
        tokens_T[chosen_N] = np.select(
            [chance_N < _MASKED, chance_N < _MASKED + _RANDOM],
            [np.full_like(drawn_N, self.vocab - 1), drawn_N],
            told_T[chosen_N],
        )
        return tokens_T, targets_T

    @property
    def num_tokens(self) -> int:
        return min(super().num_tokens, self.vocab - 1)
