"""Tokens to train on: bytes of English text, or random ones, in an order that does not depend on the ranks.

Pictures are in `images`. Imports no torch, so that a bad text file is an error before any process starts.
"""

import pydoc_data.topics
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..conf.model_spec import ModelSpec
from ..conf.schema import DataConf, ExperimentConf
from .images import ImageBatches, read_sets

Tokens = npt.NDArray[np.int64]

NUM_BYTES: Final = 256
_TRAIN, _VALIDATION = 0, 1  # keep the two streams of random numbers apart


class Batches:
    """The micro-batches of one rank.

    A sequence is numbered over all steps: within a step micro-batch by micro-batch, within a micro-batch rank
    by rank. Its tokens follow from its number and the seed alone, so that a step of the same global size
    holds the same sequences on any number of ranks, and a resumed run sees what it would have seen.

    Raises:
        ValueError: The text cannot be read or is too short for one sequence, or the vocabulary has no
            place for bytes.
    """

    def __init__(
        self,
        conf: DataConf,
        *,
        vocab: int,
        sequence: int,
        micro: int,
        accumulation: int,
        seed: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.vocab, self._sequence, self._micro, self.seed = vocab, sequence, micro, seed
        self._rank, self._num_ranks, self._accumulation = rank, num_ranks, accumulation
        self._share = range(rank * micro, (rank + 1) * micro)  # of the sequences of all ranks' micro-batches
        self._texts: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None = None
        if conf.name == "text":
            self._texts = _split_text(conf, vocab=vocab, sequence=sequence)

    def take(self, share: range) -> None:
        """From now on this rank trains on those of the sequences of all ranks' micro-batches; in an even split rank r
        has [r * micro, (r + 1) * micro).
        """
        self._share = share

    def train(self, step: int, micro_batch: int) -> tuple[Tokens, Tokens]:
        """Tokens and the tokens that follow them, both [this rank's sequences, sequence]."""
        first = (step * self._accumulation + micro_batch) * self._num_ranks * self._micro
        return self._rows(_TRAIN, first + self._share.start, len(self._share))

    def validation(self, batch: int) -> tuple[Tokens, Tokens]:
        """As `train`; the same sequences at every validation.

        Raises:
            ValueError: There is no text kept for validation.
        """
        first = (batch * self._num_ranks + self._rank) * self._micro
        return self._rows(_VALIDATION, first, self._micro)

    def num_counted(self, batches: int) -> int:
        """Sequences of a validation of so many batches, on all ranks together."""
        return batches * self._num_ranks * self._micro

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary, the first so many occur."""
        return NUM_BYTES if self._texts is not None else self.vocab

    def row(self, stream: int, number: int) -> tuple[Tokens, Tokens]:
        """What goes in and what is to be told, both [sequence], of the sequence with this number."""
        tokens = self.random_row(stream, number)
        return tokens[:-1], tokens[1:]

    def random_row(self, stream: int, number: int) -> Tokens:
        """[sequence + 1], of text or of random tokens."""
        random = np.random.default_rng((self.seed, stream, number))
        if self._texts is None:
            return random.integers(0, self.num_tokens, self._sequence + 1)
        text = self._texts[stream]
        if len(text) <= self._sequence:
            raise ValueError("data.validation_fraction leaves no text for a validation")
        start = random.integers(0, len(text) - self._sequence)
        return text[start : start + self._sequence + 1].astype(np.int64)

    def _rows(self, stream: int, first: int, count: int) -> tuple[Tokens, Tokens]:
        rows = [self.row(stream, first + i) for i in range(count)]
        return np.stack([inputs for inputs, _ in rows]), np.stack([targets for _, targets in rows])


def build_batches(
    experiment: ExperimentConf, spec: ModelSpec, *, rank: int, num_ranks: int
) -> Batches | ImageBatches:
    """What one rank trains the model on.

    Raises:
        ValueError: As `Batches` and `ImageBatches`.
    """
    from .masked import MaskedBatches  # it imports Batches

    batch, seed = experiment.batch, experiment.seed
    if spec.family == "vit":
        return ImageBatches(
            experiment.data,
            spec=spec,
            micro=batch.micro,
            accumulation=batch.accumulation,
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
        )
    kind = MaskedBatches if spec.family == "bert" else Batches
    return kind(
        experiment.data,
        vocab=spec.vocab,
        sequence=batch.sequence or spec.sequence,
        micro=batch.micro,
        accumulation=batch.accumulation,
        seed=seed,
        rank=rank,
        num_ranks=num_ranks,
    )


def check_data(experiment: ExperimentConf, *, spec: ModelSpec) -> None:
    """Read the data once, so that what is wrong with it is said before any process starts.

    Raises:
        ValueError: As `build_batches`; or a validation is asked for and the text kept for it is too short.
    """
    conf, sequence = experiment.data, experiment.batch.sequence or spec.sequence
    if conf.name == "fashion_mnist":
        read_sets(conf, num_classes=spec.classes)
    if conf.name != "text":
        return
    _, validation = _split_text(conf, vocab=spec.vocab, sequence=sequence)
    if experiment.train.eval_every and len(validation) <= sequence:
        raise ValueError(
            f"data.validation_fraction={conf.validation_fraction:g} keeps {len(validation)} bytes for "
            f"train.eval_every={experiment.train.eval_every}: must be at least batch.sequence + 1 = "
            f"{sequence + 1} bytes; raise it, or set train.eval_every=0"
        )


def _split_text(
    conf: DataConf, *, vocab: int, sequence: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """(train, validation): the end of the text is kept for validation."""
    if vocab < NUM_BYTES:
        raise ValueError(f"model.vocab={vocab}: must be at least {NUM_BYTES}, for data=text is bytes")
    text = np.frombuffer(_read_text(conf), np.uint8)
    cut = len(text) - int(len(text) * conf.validation_fraction)
    if cut <= sequence:
        where = f"data.path={conf.path!r}" if conf.path else "data=text"
        raise ValueError(
            f"{where} has {cut} bytes to train on: must be at least batch.sequence + 1 = {sequence + 1}"
        )
    return text[:cut], text[cut:]


def _read_text(conf: DataConf) -> bytes:
    if conf.path is None:
        topics = pydoc_data.topics.topics
        return "\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        text = Path(conf.path).read_bytes()
    except OSError as err:
        raise ValueError(f"data.path={conf.path!r}: cannot be read: {err.strerror}") from err
    if not text:
        raise ValueError(f"data.path={conf.path!r}: the file is empty")
    return text
