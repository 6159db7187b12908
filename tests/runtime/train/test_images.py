"""IDX files are read whole or refused by name; which picture is trained on when does not depend on the ranks."""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinbed.conf.compose import compose
from twinbed.conf.model_spec import spec_from_keys
from twinbed.conf.schema import DataConf
from twinbed.runtime.data import check_data
from twinbed.runtime.idx import read_idx
from twinbed.runtime.images import NO_CLASS, ImageBatches, read_sets

VIT = {"family": "vit", "layers": 1, "hidden": 8, "heads": 2}
SPEC = spec_from_keys(VIT | {"extra": {"image": 28, "patch": 14, "channels": 1, "classes": 10}})
Folder = Callable[..., Path]


def conf(folder: Path | None, *, num_train: int = 40, num_test: int = 21) -> DataConf:
    path = None if folder is None else str(folder)
    return DataConf(name="fashion_mnist", path=path, num_train=num_train, num_test=num_test)


def batches(data: DataConf, **keys: Any) -> ImageBatches:
    return ImageBatches(
        data, **{"spec": SPEC, "micro": 1, "accumulation": 1, "seed": 0, "rank": 0, "num_ranks": 1, **keys}
    )


def test_a_file_is_read_plain_and_packed(tmp_path: Path) -> None:
    content = bytes.fromhex("00000803 00000002 00000001 00000003") + bytes(range(6))
    for name, stored in (("plain", content), ("packed.gz", gzip.compress(content))):
        path = tmp_path / name
        path.write_bytes(stored)
        assert read_idx(path, num_sizes=3).tolist() == [[[0, 1, 2]], [[3, 4, 5]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing, must be 00 00 08 03"),
        (bytes.fromhex("00000801 00000001 00"), "begins with 00 00 08 01, must be 00 00 08 03"),
        (bytes.fromhex("00000d03 00000001 00000001 00000001 00000000"), "begins with 00 00 0d 03"),
        (bytes.fromhex("00000803 0000"), "truncated within its header of 16 bytes: has 6"),
        (
            bytes.fromhex("00000803 00000002 00000001 00000003 0001020304"),
            "truncated: its header says 2 x 1 x 3 = 6 bytes, and 5 follow",
        ),
        (bytes.fromhex("00000803 00000001 00000001 00000001 0000"), "longer than it says: .* = 1 bytes"),
        (gzip.compress(bytes(100))[:-9], "the gzip file is damaged or truncated"),
        (b"\x1f\x8b\x08\x00rubbish", "the gzip file is damaged or truncated"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}"):
        read_idx(path, num_sizes=3)


def test_a_packed_folder_holds_the_same(picture_folder: Folder) -> None:
    plain = read_sets(conf(picture_folder()), num_classes=10)
    for path in picture_folder().iterdir():
        path.unlink()
    packed = read_sets(conf(picture_folder(packed=True)), num_classes=10)
    for which, found in plain.items():
        assert np.array_equal(found.images_NHW, packed[which].images_NHW)
        assert np.array_equal(found.labels_N, packed[which].labels_N)


def test_a_step_holds_the_same_pictures_on_any_number_of_ranks(picture_folder: Folder) -> None:
    data = conf(picture_folder())
    whole = batches(data, micro=16)
    by_ranks = [batches(data, rank=r, num_ranks=4, micro=2, accumulation=2) for r in range(4)]
    for step in (0, 2, 7, 1):  # 40 pictures: step 2 goes over the end of an epoch; and back to an earlier one
        images, labels = whole.train(step, 0)
        parts = [by_ranks[r].train(step, k) for k in range(2) for r in range(4)]
        assert np.array_equal(np.concatenate([part[0] for part in parts]), images)
        assert np.array_equal(np.concatenate([part[1] for part in parts]), labels)
        assert images.shape == (16, 1, 28, 28)
        assert (images.dtype, labels.dtype) == (np.float32, np.int64)
    assert not np.array_equal(whole.train(0, 0)[0], batches(data, micro=16, seed=1).train(0, 0)[0])


def test_every_epoch_holds_every_picture_once_in_another_order(picture_folder: Folder) -> None:
    data = conf(picture_folder())
    found = read_sets(data, num_classes=10)[0]
    mine = batches(data, micro=8)
    epochs = [
        np.concatenate([mine.train(epoch * 5 + i, 0)[0].reshape(8, -1) for i in range(5)])
        for epoch in range(2)
    ]
    sums = found.images_NHW.reshape(40, -1).astype(float)
    scaled = (sums - sums.mean()) / sums.std()
    for seen in epochs:
        assert np.allclose(np.sort(seen.sum(1)), np.sort(scaled.sum(1)), rtol=1e-4, atol=1e-3)
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_micro_batch_may_be_larger_than_the_data(picture_folder: Folder) -> None:
    images, labels = batches(conf(picture_folder(), num_train=3), micro=8).train(0, 0)
    assert len(np.unique(images.reshape(8, -1), axis=0)) == 3
    assert labels.shape == (8,)


def test_pixels_have_mean_0_and_deviation_1(picture_folder: Folder) -> None:
    images, _ = batches(conf(picture_folder()), micro=40).train(0, 0)
    assert images.mean() == pytest.approx(0, abs=1e-5)
    assert images.std() == pytest.approx(1, rel=1e-5)


def test_a_validation_counts_each_test_picture_once(picture_folder: Folder) -> None:
    data = conf(picture_folder())
    ranks = [batches(data, rank=r, num_ranks=2, micro=4) for r in range(2)]
    labels = np.concatenate([ranks[r].validation(b)[1] for b in range(3) for r in range(2)])
    expected = read_sets(data, num_classes=10)[1].labels_N
    assert labels.tolist() == [*expected.tolist(), NO_CLASS, NO_CLASS, NO_CLASS]
    assert ranks[0].num_counted(3) == 21
    assert ranks[0].num_counted(2) == 16


def test_random_pictures_depend_on_number_and_seed_alone() -> None:
    data = DataConf(name="synthetic")
    whole = batches(data, micro=4)
    halves = [batches(data, micro=2, rank=r, num_ranks=2) for r in range(2)]
    for kind in ("train", "validation"):
        arguments = (3, 0) if kind == "train" else (3,)
        expected = getattr(whole, kind)(*arguments)
        for part in range(2):
            found = np.concatenate([getattr(half, kind)(*arguments)[part] for half in halves])
            assert np.array_equal(found, expected[part])
    assert not np.array_equal(whole.train(0, 0)[0], whole.validation(0)[0])
    assert whole.num_counted(2) == 8


def write(path: Path, array: np.ndarray) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "t10k-labels-idx1-ubyte").unlink(), "t10k-labels-idx1-ubyte: no such file, nor .*gz"),
        (
            lambda f: write(f / "t10k-labels-idx1-ubyte", np.zeros(20, np.uint8)),
            "has 20 labels for 21 images",
        ),
        (
            lambda f: write(f / "train-labels-idx1-ubyte", np.full(40, 10, np.uint8)),
            "has label 10, must be below 10 classes",
        ),
        (
            lambda f: write(f / "train-images-idx3-ubyte", np.zeros((40, 28, 27), np.uint8)),
            "has images of 28 x 27, must be 28 x 28",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    picture_folder: Folder, spoil: Callable[[Path], None], message: str
) -> None:
    folder = picture_folder()
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        read_sets(conf(folder), num_classes=10)


def test_more_pictures_than_the_file_has_are_refused(picture_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"data.num_test=22: .*t10k-images-idx3-ubyte has only 21"):
        read_sets(conf(picture_folder(), num_test=22), num_classes=10)


def test_what_is_missing_is_said_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["target=runtime", "data=fashion_mnist", "model=vit_fashion"]
    composed = compose([*keys, f"data.path={tmp_path / 'none'}"])
    with pytest.raises(ValueError, match=r"data.path='.*none': no such folder; install it"):
        check_data(composed.experiment, spec=composed.spec)
    monkeypatch.setattr("twinbed.runtime.images.DEBIAN_FOLDER", tmp_path / "no_package")
    composed = compose(keys)
    with pytest.raises(ValueError, match="apt-get install dataset-fashion-mnist") as caught:
        check_data(composed.experiment, spec=composed.spec)
    assert "data.path=FOLDER" in str(caught.value)
