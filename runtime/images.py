"""Images to train on: four IDX files, or random ones, in an order that does not depend on the ranks.

Imports no torch, so that a bad file is an error before any process starts.
Shapes: B images of a micro-batch, C channels, H rows, W columns.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..conf.model_spec import ModelSpec
from ..conf.schema import DataConf
from .idx import read_idx

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

DEBIAN_FOLDER: Final = Path("/usr/share/datasets/fashion-mnist")  # of its package dataset-fashion-mnist
NO_CLASS: Final = -100  # the label of an image that only fills up a batch (torch's own ignore_index)

_TRAIN, _TEST = 0, 1  # keep the two streams of random numbers apart
_NAMES: Final = {_TRAIN: "train", _TEST: "t10k"}


@dataclass(frozen=True, slots=True)
class ImageSet:
    """One of the two halves, as the files have it."""

    images_NHW: npt.NDArray[np.uint8]
    labels_N: npt.NDArray[np.uint8]


class ImageBatches:
    """The micro-batches of one rank.

    Images are numbered over all steps: within a step micro-batch by micro-batch, within a micro-batch rank by
    rank. Number n is the (n mod num_train)-th of the permutation that seed and epoch (n div num_train) give, so a
    step of the same global size holds the same images on any number of ranks, no image is left out, and there is no
    partial batch: a step at the end of an epoch goes on with the next. Pixels are brought to mean 0 and deviation 1
    (both over all that are trained on).

    A validation goes over the test images in their order; what is left of the last batches has the label `NO_CLASS`.

    Raises:
        ValueError: As `read_sets`.
    """

    def __init__(
        self,
        conf: DataConf,
        *,
        spec: ModelSpec,
        micro: int,
        accumulation: int,
        seed: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        self._spec, self._micro, self._accumulation, self._seed = spec, micro, accumulation, seed
        self._rank, self._num_ranks = rank, num_ranks
        self._share = range(rank * micro, (rank + 1) * micro)  # of the images of all ranks' micro-batches
        self._sets: dict[int, ImageSet] | None = None
        self._epoch, self._order_N = -1, np.empty(0, np.int64)
        if conf.name == "fashion_mnist":
            self._sets = read_sets(conf, num_classes=spec.classes)
            mean, deviation = _pixels(self._sets[_TRAIN].images_NHW)
            self._scaled = ((np.arange(256) - mean) / deviation).astype(np.float32)  # of each value of a byte

    def take(self, share: range) -> None:
        """As `data.Batches.take`."""
        self._share = share

    def train(self, step: int, micro_batch: int) -> tuple[Images, Labels]:
        """Images [this rank's, channels, rows, columns] and labels [this rank's]."""
        first = (step * self._accumulation + micro_batch) * self._num_ranks * self._micro + self._share.start
        if self._sets is None:
            return self._random(_TRAIN, first, len(self._share))
        numbers_B = np.arange(first, first + len(self._share))
        num_train = len(self._sets[_TRAIN].labels_N)
        chosen_B = np.empty_like(numbers_B)
        for epoch in range(first // num_train, numbers_B[-1] // num_train + 1):
            here_B = numbers_B // num_train == epoch
            chosen_B[here_B] = self._order(epoch, num_train)[numbers_B[here_B] % num_train]
        return self._take(_TRAIN, chosen_B)

    def validation(self, batch: int) -> tuple[Images, Labels]:
        """As `train`; the same images at every validation."""
        first = (batch * self._num_ranks + self._rank) * self._micro
        if self._sets is None:
            return self._random(_TEST, first, self._micro)
        numbers_B = np.arange(first, first + self._micro)
        num_test = len(self._sets[_TEST].labels_N)
        images, labels = self._take(_TEST, numbers_B % num_test)
        labels[numbers_B >= num_test] = NO_CLASS
        return images, labels

    def num_counted(self, batches: int) -> int:
        """Images with a label in a validation of so many batches, on all ranks together."""
        given = batches * self._num_ranks * self._micro
        return given if self._sets is None else min(given, len(self._sets[_TEST].labels_N))

    def _order(self, epoch: int, num_train: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order_N = np.random.default_rng((self._seed, _TRAIN, epoch)).permutation(num_train)
        return self._order_N

    def _take(self, which: int, numbers_B: npt.NDArray[np.int64]) -> tuple[Images, Labels]:
        assert self._sets is not None
        found = self._sets[which]
        images_BCHW = np.take(self._scaled, found.images_NHW[numbers_B])[:, None]
        return images_BCHW, found.labels_N[numbers_B].astype(np.int64)

    def _random(self, stream: int, first: int, count: int) -> tuple[Images, Labels]:
        spec = self._spec
        images, labels = [], []
        for number in range(first, first + count):
            random = np.random.default_rng((self._seed, stream, number))
            images.append(random.standard_normal((spec.channels, *spec.image), np.float32))
            labels.append(random.integers(0, spec.classes))
        return np.stack(images), np.array(labels, np.int64)


def read_sets(conf: DataConf, *, num_classes: int) -> dict[int, ImageSet]:
    """The first data.num_train images to train on, and the first data.num_test to validate on.

    Raises:
        ValueError: There is no such folder, a file is missing or broken, holds fewer images than that or images of
            another size than 28 x 28, or a label is no class.
    """
    folder = DEBIAN_FOLDER if conf.path is None else Path(conf.path)
    if not folder.is_dir():
        ways = (
            "install it (Debian and Ubuntu: apt-get install dataset-fashion-mnist), or give data.path=FOLDER"
        )
        said = (
            f"data.path={conf.path!r}" if conf.path is not None else f"data=fashion_mnist looks in {folder}"
        )
        raise ValueError(f"{said}: no such folder; {ways} with the four IDX files of Fashion-MNIST")
    assert conf.num_train is not None
    assert conf.num_test is not None
    return {
        which: _read_set(folder, which, num_images=count, key=key, num_classes=num_classes)
        for which, count, key in (
            (_TRAIN, conf.num_train, "data.num_train"),
            (_TEST, conf.num_test, "data.num_test"),
        )
    }


def _read_set(folder: Path, which: int, *, num_images: int, key: str, num_classes: int) -> ImageSet:
    paths = [_find(folder, f"{_NAMES[which]}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    images_NHW, labels_N = read_idx(paths[0], num_sizes=3), read_idx(paths[1], num_sizes=1)
    if images_NHW.shape[1:] != (28, 28):
        rows, columns = images_NHW.shape[1:]
        raise ValueError(f"{paths[0]}: has images of {rows} x {columns}, must be 28 x 28")
    if len(images_NHW) != len(labels_N):
        raise ValueError(f"{paths[1]}: has {len(labels_N)} labels for {len(images_NHW)} images")
    if len(images_NHW) < num_images:
        raise ValueError(
            f"{key}={num_images}: {paths[0]} has only {len(images_NHW)}; give {key} at most that"
        )
    if len(labels_N) and labels_N.max() >= num_classes:
        raise ValueError(f"{paths[1]}: has label {labels_N.max()}, must be below {num_classes} classes")
    return ImageSet(images_NHW[:num_images], labels_N[:num_images])


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(f"{folder / name}: no such file, nor {name}.gz; data.path must hold all four IDX files")


def _pixels(images_NHW: npt.NDArray[np.uint8]) -> tuple[float, float]:
    """Mean and deviation, in steps of 0 to 255; a set of one colour has deviation 1."""
    counts = np.zeros(256, np.int64)
    for begin in range(0, len(images_NHW), 4096):  # bincount takes 8 bytes a pixel
        counts += np.bincount(images_NHW[begin : begin + 4096].ravel(), minlength=256)
    values, num = np.arange(256), counts.sum()
    mean = float((counts * values).sum() / num)
    return mean, float(np.sqrt((counts * (values - mean) ** 2).sum() / num)) or 1.0
