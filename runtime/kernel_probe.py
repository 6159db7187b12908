"""Codecs, copies and matmuls: how long each takes while all ranks do the same."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .probe_timing import MATMUL_SIZE, REPEATS, agreed_mean, timed

CODEC_ELEMENTS = (4_096, 262_144)
PARTS = (2, 8)  # that a fused kernel adds up


class CodecProbe:
    """Encoding and decoding as the interpreter does them, all ranks at once."""

    def __init__(self, dtype: Any, device: Any) -> None:
        import torch

        from ..kernels import (
            decode_segments,
            dequantize_reduce,
            dequantize_reduce_quantize,
            encode_segments,
        )

        self._times: dict[str, list[float]] = {}
        self._calls: list[tuple[str, Callable[[], object]]] = []
        for n in CODEC_ELEMENTS:
            x = torch.randn(n, device=device).to(dtype)
            for bits, block in ((8, 2048), (4, 256)):
                options: dict[str, Any] = {"segments": (n,), "bits": bits, "block": block}
                message = encode_segments(x, **options)
                total = torch.zeros(n, device=device)
                self._calls += [
                    (f"encode{bits}/{n}", lambda x=x, o=options: encode_segments(x, **o)),  # type: ignore[misc]
                ]
                if bits == 8:
                    self._calls.append(
                        (f"decode8/{n}", lambda m=message, o=options, x=x: decode_segments(m, **o, out=x))  # type: ignore[misc]
                    )
                else:
                    self._calls.append(
                        (
                            f"decode4/{n}",
                            lambda m=message, o=options, t=total: dequantize_reduce(m[None], t, **o, out=t),  # type: ignore[misc]
                        )
                    )
                    for parts in PARTS:
                        again = partial(
                            dequantize_reduce_quantize,
                            message.repeat(parts, 1),
                            **options,
                            out_bits=4,
                            out_block=256,
                        )
                        self._calls.append((f"{parts}requantize/{n}", again))
            source, target = torch.randn(n, device=device), torch.empty(n, device=device)
            self._calls.append((f"copy/{n}", lambda s=source, t=target: t.copy_(s)))  # type: ignore[misc]
        for name, call in self._calls:
            self._times[name] = []
            call()

    def batch(self) -> None:
        for name, call in self._calls:
            self._times[name].append(timed(call, REPEATS))

    def result(self) -> dict[str, dict[str, float]]:
        """Of each kernel: fixed ns of a call, and ns of an element."""
        names = list(self._times)
        means = dict(
            zip(names, agreed_mean([statistics.median(self._times[name]) for name in names]), strict=True)
        )
        small, large = CODEC_ELEMENTS
        found = {}
        for kind in sorted({name.partition("/")[0] for name in names}):
            a, b = means[f"{kind}/{small}"] * 1e9, means[f"{kind}/{large}"] * 1e9
            slope = max(0.0, (b - a) / (large - small))
            found[kind] = {"fixed_ns": max(0.0, a - slope * small), "ns_per_element": slope}
        few, many = (found.pop(f"{parts}requantize") for parts in PARTS)
        decode = max(0.0, many["ns_per_element"] - few["ns_per_element"]) / (PARTS[1] - PARTS[0])
        encode = max(0.0, few["ns_per_element"] - PARTS[0] * decode)
        return found | {
            "requantize_decode4": {"fixed_ns": 0.0, "ns_per_element": decode},
            "requantize_encode4": {"fixed_ns": few["fixed_ns"], "ns_per_element": encode},
        }


class MatmulProbe:
    """The rate of a matmul alone (all ranks at once), and while a collective runs beside it."""

    def __init__(self, device: Any) -> None:
        import torch

        self._a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
        self._b = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
        self._alone: list[float] = []
        self._beside: float | None = None

    def _work(self) -> object:
        return self._a @ self._b

    def batch(self) -> None:
        self._alone.append(timed(self._work, REPEATS))

    def beside(self, collective: Callable[[], None]) -> None:
        import threading

        calls = 0
        running = threading.Event()

        def communicate() -> None:
            running.set()
            for _ in range(4 * REPEATS):  # the same number on all ranks
                collective()

        thread = threading.Thread(target=communicate)
        thread.start()
        running.wait()
        started = time.perf_counter()
        while thread.is_alive():
            self._work()
            calls += 1
        self._beside = (time.perf_counter() - started) / max(calls, 1)
        thread.join()

    def result(self) -> dict[str, float]:
        median = statistics.median(self._alone)
        alone, beside = agreed_mean([median, median if self._beside is None else self._beside])
        flop = 2 * MATMUL_SIZE**3
        return {"flop_per_s": flop / alone, "flop_per_s_beside_collective": flop / beside}
