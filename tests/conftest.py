"""Options and fixtures of all tests."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def picture_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder as data=fashion_mnist reads it: random pictures, each class with a brightness of its own."""

    def write(*, num_train: int = 40, num_test: int = 21, seed: int = 0, packed: bool = False) -> Path:
        folder = tmp_path / "pictures"
        folder.mkdir(exist_ok=True)
        random = np.random.default_rng(seed)
        for part, num in (("train", num_train), ("t10k", num_test)):
            labels_N = random.integers(0, 10, num, dtype=np.uint8)
            noise_NHW = random.integers(0, 56, (num, 28, 28), dtype=np.uint8)
            for kind, array in (
                ("images-idx3-ubyte", noise_NHW + 20 * labels_N[:, None, None]),
                ("labels-idx1-ubyte", labels_N),
            ):
                sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
                content = bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()
                name = f"{part}-{kind}"
                if packed:
                    (folder / f"{name}.gz").write_bytes(gzip.compress(content))
                else:
                    (folder / name).write_bytes(content)
        return folder

    return write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-goldens", action="store_true", help="write golden files instead of comparing")


@pytest.fixture
def same_as_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with a file beside the test, or write the file under --rewrite-goldens."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--rewrite-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, f"{path} differs; --rewrite-goldens writes it anew"

    return check
