"""The native codec: built once, safe for processes that start together, replaceable; and its threads."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twinbed.kernels.native as native
from twinbed.kernels import (
    decode_segments,
    dequantize_reduce,
    dequantize_reduce_quantize,
    encode,
    encode_segments,
    encode_with_feedback,
    quantize_blocks,
    reduce_quantize_with_feedback,
)
from twinbed.kernels.codec import threads_for

CODEC_TESTS = Path(__file__).with_name("test_codec.py")

# `native` imports no torch, so a process that loads it by its file starts in a moment.
LOAD = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("native", {native.__file__!r})
module = sys.modules["native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.stdin.read()  # until all have come so far
ready = module.prepare()
print(json.dumps([ready.backend, ready.reason, ready.seconds]))
"""

FALLBACK = """
import json, warnings
warnings.simplefilter("always")
import torch
from twinbed.kernels import decode, dequantize_reduce, encode, encode_segments, prepare
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ready = prepare()
    x = torch.tensor([127.0, 0.5, 1.5, -127.0, 2.5])
    message = encode(x, bits=8, block=8)
    back = decode(message, bits=8, block=8, numel=5).tolist()
    slices = encode_segments(torch.ones(3, 4), segments=(4,), bits=4, block=4)
    total = dequantize_reduce(slices, segments=(4,), bits=4, block=4).tolist()
    prepare()
warned = [str(one.message) for one in caught]
print(json.dumps([ready.backend, ready.reason, message.tolist(), back, total, warned]))
"""


def environment(**changes: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "CXX"}, **changes}


def start(cache: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD],
        env=environment(XDG_CACHE_HOME=cache, **changes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str, float, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    backend, reason, seconds = json.loads(out)
    return backend, reason, seconds, err


def test_processes_that_start_together_build_once(tmp_path):
    processes = [start(str(tmp_path)) for _ in range(4)]
    for process in processes:
        process.stdin.close()
        process.stdin = None
    results = [finish(process) for process in processes]
    assert [backend for backend, *_ in results] == ["native"] * 4
    assert sum(reason.startswith("built with") for _, reason, *_ in results) == 1
    assert len(list((tmp_path / "twinbed" / "kernels").glob("*.so"))) == 1
    assert not list((tmp_path / "twinbed" / "kernels").glob("*.tmp"))
    backend, reason, seconds, _ = finish(start(str(tmp_path)))
    assert (backend, reason[:6]) == ("native", "cached")
    assert seconds < 1.0


def test_a_damaged_library_is_built_again(tmp_path):
    finish(start(str(tmp_path)))
    (library,) = (tmp_path / "twinbed" / "kernels").glob("*.so")
    for damaged in (b"", b"not a library"):
        library.write_bytes(damaged)
        backend, reason, _, err = finish(start(str(tmp_path)))
        assert (backend, reason[:5], err) == ("native", "built", "")


def test_a_cache_that_others_can_write_is_not_trusted(tmp_path):
    folder = tmp_path / "cache" / "twinbed" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (tmp_path / "tmp").mkdir()
    backend, _, _, _ = finish(start(str(tmp_path / "cache"), TMPDIR=str(tmp_path / "tmp")))
    assert backend == "native"
    assert not list(folder.glob("*.so"))
    assert len(list((tmp_path / "tmp").glob("twinbed-kernels-*/*.so"))) == 1


def test_a_compiler_that_fails_is_quoted(tmp_path):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    broken.chmod(0o755)
    backend, reason, _, err = finish(start(str(tmp_path), CXX=str(broken)))
    assert backend == "reference"
    assert "out of luck" in reason
    assert err.count("RuntimeWarning") == 1
    assert not list((tmp_path / "twinbed" / "kernels").glob("*.tmp"))


def test_this_processors_own_instructions_are_used(tmp_path):
    """A source that only compiles for another processor would be built for any, and be slow, without a word."""
    program = "int main() { return 0; }"
    command = ["c++", *native._FLAGS, *native._TUNING[0], "-x", "c++", "-", "-o", str(tmp_path / "empty")]
    if subprocess.run(command, input=program, text=True, capture_output=True).returncode != 0:
        pytest.skip("this compiler does not know this processor")
    _, reason, _, _ = finish(start(str(tmp_path)))
    assert reason.endswith(" ".join(native._TUNING[0]))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "without",
    [
        pytest.param("-mno-avx512bf16", marks=pytest.mark.long),
        pytest.param("-mno-avx512vbmi", marks=pytest.mark.long),
        pytest.param("-mno-avx512f", marks=pytest.mark.long),
        "-mno-avx2",
    ],
)
def test_other_processors_give_the_same_bits(without, tmp_path):
    """What this machine's vectors do, loops for any processor do elsewhere: all of the codec's tests, built for one."""
    if platform.machine() != "x86_64":
        pytest.skip("instruction sets of x86")
    compiler = shutil.which("c++")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CODEC_TESTS)],
        env=environment(CXX=f"{compiler} {without}", XDG_CACHE_HOME=str(tmp_path), PYTEST_ADDOPTS=""),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert list((tmp_path / "twinbed" / "kernels").glob("*.so"))


def test_without_a_compiler_the_reference_works_and_says_so_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FALLBACK],
        env=environment(PATH="", XDG_CACHE_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    backend, reason, message, back, total, warned = json.loads(done.stdout)
    assert backend == "reference"
    assert "no C++ compiler found" in reason
    assert message == [127, 0, 2, 129, 2, 0, 0, 0, 0, 0, 128, 63]  # codes, zeros to the block's end, 1.0f
    assert back == [127.0, 0.0, 2.0, -127.0, 2.0]
    assert total == [3.0] * 4
    (only,) = [text for text in warned if "twinbed.kernels" in text]
    assert "Install a C++ compiler" in only


def test_threads_treat_denormals_as_their_caller_does():
    x = torch.full((3_000_000,), 1e-40)
    threads = torch.get_num_threads()
    assert torch.set_flush_denormal(True)
    try:
        torch.set_num_threads(4)
        flushed = encode(x, bits=8, block=256)
        assert torch.equal(flushed, encode(x, bits=8, block=256, reference=True))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert not flushed.any()
    assert encode(x, bits=8, block=256).any()


def test_any_number_of_threads_gives_the_same_bytes():
    """Sizes at which the codec takes several threads, in blocks that no number of threads divides."""
    segments = (300_000, 1, 333_333)
    x = torch.randn(3, sum(segments), generator=torch.Generator().manual_seed(0)).bfloat16()
    options = {"segments": segments, "bits": 4, "block": 36}
    own = x[0].float()
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            message = encode_segments(x, **options, order=(2, 0, 1))
            error, sum_error = torch.zeros_like(x), torch.zeros_like(own)
            found.append(
                [
                    message,
                    decode_segments(message, **options),
                    dequantize_reduce(message, own, **options),
                    dequantize_reduce_quantize(message, own, **options, out_bits=8, out_block=12),
                    encode_with_feedback(x, error, **options, beta=0.0),
                    error,
                    reduce_quantize_with_feedback(message, own, sum_error, **options),
                    sum_error,
                    *quantize_blocks(x, bits=8, block=256),
                ]
            )
            assert threads_for(x.nbytes) == count
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(one, same)
