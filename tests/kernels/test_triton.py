"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled for two generations of GPUs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install .[gpu]"),
    pytest.mark.slow,
]
INTERPRETED = Path(__file__).with_name("triton_interpreted.py")


@pytest.mark.timeout(300)
def test_interpreted_kernels_equal_the_reference(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(INTERPRETED), f"--basetemp={tmp_path / 'base'}"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 30


def signature(kernel, pointers: dict[str, str], constants: dict[str, object]) -> dict[str, str]:
    """Types of a kernel's arguments: what is neither a pointer nor a constant is a count, a stride or a factor."""
    floats = {"keep": "fp32", "take": "fp32"}
    return {
        name: "constexpr" if name in constants else pointers.get(name) or floats.get(name, "i64")
        for name in kernel.arg_names
    }


GEOMETRY = {
    8: {"T": 2, "BLOCK": 2048, "H": 1024, "ALIGN": 16},
    4: {"T": 16, "BLOCK": 256, "H": 128, "ALIGN": 16},
}
BUFFERS = {"table": "*i64", "order": "*i64", "codes": "*u8", "scales": "*u8", "messages": "*u8"}


def cases():
    from twinbed.kernels import triton_codec as codec
    from twinbed.kernels import triton_matmul as matmul

    for bits, qmax in ((8, 127), (4, 7)):
        shape = GEOMETRY[bits] | {"BITS": bits}
        yield (
            f"encode{bits}",
            codec._encode_kernel,
            {"x": "*i16", "error": "*i16", **BUFFERS},
            {**shape, "QMAX": qmax, "HAS_ORDER": True, "HAS_ERROR": bits == 4},
        )
        yield f"decode{bits}", codec._decode_kernel, {"out": "*i16", **BUFFERS}, {**shape, "ADD": False}
    shape = GEOMETRY[4] | {"BITS": 4, "HAS_OWN": True}
    yield "reduce", codec._reduce_kernel, {"own": "*fp32", "out": "*fp32", **BUFFERS}, shape
    yield (
        "reduce_encode",
        codec._reduce_encode_kernel,
        {"own": "*i16", "out": "*u8", "error": "*i16", **BUFFERS},
        {**shape, "OUT_BITS": 4, "QMAX": 7, "HAS_ERROR": False},
    )
    indices = {"rows": "*i64", "columns": "*i64", "inner": "*i64"}
    tiles = {"I": 64, "J": 64, "K": 32, "PRECISION": "ieee"}
    yield (
        "matmul",
        matmul._matmul_kernel,
        {"a": "*bf16", "b": "*bf16", "out": "*bf16", **indices},
        {**tiles, "PICK_I": False, "PICK_J": False, "PICK_K": True},
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", capability, 32)
    for name, kernel, pointers, constants in cases():
        types = signature(kernel, pointers, constants)
        # what the launcher finds out by itself: pointers and strides are multiples of 16
        aligned = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind == "i64"]
        source = ASTSource(
            fn=kernel,
            signature=types,
            constexprs=constants,
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False, "num_warps": 4})
        ptx = compiled.asm["ptx"]
        assert f".target sm_{capability}" in ptx, name
        assert compiled.asm["cubin"], name
        if name == "matmul":
            assert "mma" in ptx
            continue
        # One IEEE operation for each of the reference's: no contraction, no approximate division, no flushing.
        assert "fma.rn.f32" not in ptx, name
        assert "div.full.f32" not in ptx, name
        assert ".ftz" not in ptx, name
        if "encode" in name:
            assert "div.rn.f32" in ptx, name
        assert re.search(r"(ld|st)\.global[.\w:]*\.v[24]", ptx), f"{name} moves one element at a time"
