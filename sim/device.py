"""How long kernels take on one device: matmuls by their shape, flash attention, and what memory bounds.

A product is cut into tiles of its result, dealt out to the multiprocessors in waves; the last wave may be
empty for the most part (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization).
`layers` says which kernels a block, the embedding and the head are made of.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

from ..conf.model_flop import Matmul
from ..conf.schema import DeviceConf

# Tiles that cuBLAS and CUTLASS offer, largest first: the same guide names 256x128 and 128x256 as the most
# efficient and 64x64 as the least. How much less is a guess: a smaller tile reads its operands more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
SPLITS = (1, 2, 4, 8)  # of the sum over k, where a result has too few tiles to fill the device
MIN_SPLIT_K = 512  # a split leaves each part at least so many
PARTIAL_BYTES = 8  # of one element of a split's result: written and read in fp32

FLASH_TILE = 128  # queries and keys of a block; a causal mask cuts the blocks on the diagonal in half
FLASH_BACKWARD = 2.5  # five products for the forward's two (Dao 2023, section 3.1)


@dataclass(frozen=True, slots=True)
class Tally:
    """What a stretch of computation takes of a device.

    `flop` counts as published figures do. `matmul_ns` is of tensor cores, and `busy_ns` the same while a
    collective runs; `other_ns` of memory-bound kernels and of the gaps between kernels. The host launches
    `kernels` of them.
    """

    flop: int = 0
    matmul_ns: float = 0.0
    busy_ns: float = 0.0
    other_ns: float = 0.0
    nbytes: float = 0.0  # read and written in device memory
    kernels: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.flop + other.flop,
            self.matmul_ns + other.matmul_ns,
            self.busy_ns + other.busy_ns,
            self.other_ns + other.other_ns,
            self.nbytes + other.nbytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, factor: int) -> "Tally":
        return Tally(
            factor * self.flop,
            factor * self.matmul_ns,
            factor * self.busy_ns,
            factor * self.other_ns,
            factor * self.nbytes,
            factor * self.kernels,
        )

    def with_flop(self, flop: int) -> "Tally":
        return replace(self, flop=flop)


class Device:
    """Kernels on one device.

    Args:
        element_bytes: Of activations and weights.
        num_devices: That work in step: all wait for the slowest of them (`DeviceConf.spread`).
    """

    def __init__(self, conf: DeviceConf, *, element_bytes: int, num_devices: int = 1) -> None:
        self.conf = conf
        self.element_bytes = element_bytes
        self.peak_flop_per_s = conf.peak_flop_per_s(element_bytes)
        self._pace = 1.0 + conf.spread * slowest_of(num_devices)

    @cached_property
    def memory_Bps(self) -> float:
        return self.conf.memory_Bps * self.conf.memory_efficiency

    @cached_property
    def matmul_flop_per_s(self) -> float:
        """Of large products, within a tile."""
        return self.peak_flop_per_s * self.conf.matmul_efficiency * self.conf.sustained / self._pace

    def time_ns(self, work: Tally) -> float:
        """Wall time of `work`: the host runs ahead of the device, so the slower of the two counts."""
        return max(work.matmul_ns + work.other_ns, work.kernels * float(self.conf.host_ns))

    def slowdown(self, work: Tally) -> float:
        """How many times as long `work` takes while a collective runs."""
        alone_ns = self.time_ns(work)
        return max(1.0, (work.busy_ns + work.other_ns) / alone_ns) if alone_ns else 1.0

    def memory_ns(self, nbytes: float) -> float:
        return nbytes / self.memory_Bps * 1e9

    def matmul_ns(self, product: Matmul, *, result_bytes: int | None = None, busy: bool = False) -> float:
        """One kernel: bounded by its tiles or by its bytes.

        Args:
            result_bytes: Moved for one element of the result; by default it is written once.
            busy: A collective runs, which holds some of the multiprocessors.
        """
        if not product.flop:
            return self.memory_ns(self.matmul_bytes(product, result_bytes))
        sms = self.conf.sms - self.conf.collective_sms * busy
        bound_ns = self.memory_ns(self.matmul_bytes(product, result_bytes))
        ns = max(self._tiles_ns(product, sms), bound_ns)
        return ns * self.conf.busy_slowdown if busy else ns

    def matmul_bytes(self, product: Matmul, result_bytes: int | None = None) -> float:
        """Of a product over no columns the result alone, which is set to zero."""
        operands = (product.m * product.k + product.k * product.n) * self.element_bytes if product.flop else 0
        result = product.m * product.n * (self.element_bytes if result_bytes is None else result_bytes)
        return float(product.num * (operands + result))

    def _tiles_ns(self, product: Matmul, sms: int) -> float:
        rate = self.matmul_flop_per_s
        if not sms:
            return product.flop / rate * 1e9
        per_sm = rate / self.conf.sms
        best = float("inf")
        for high, wide, share in TILES:
            tiles = -(-product.m // high) * -(-product.n // wide) * product.num
            for split in SPLITS:
                k = product.k / split
                if split > 1 and (k < MIN_SPLIT_K or tiles * split > sms):
                    break
                waves = -(-tiles * split // sms)
                ns = waves * 2 * high * wide * (k + self.conf.matmul_ramp) / (per_sm * share) * 1e9
                if split > 1:
                    ns += self.memory_ns(float(split * PARTIAL_BYTES * product.m * product.n * product.num))
                best = min(best, ns)
        return best

    def linear(self, product: Matmul, *, gradient_bytes: int | None = None) -> tuple[Tally, Tally]:
        """Forward and backward of tokens (rows) times a weight.

        Args:
            gradient_bytes: Moved for one element of the weight's gradient, where it is added to one in fp32.
        """
        fixed = (product.m + self.conf.matmul_fixed_tokens) / product.m
        inputs, weights = transposed(product)
        backward = self._kernel(inputs, fixed) + self._kernel(weights, fixed, gradient_bytes)
        return self._kernel(product, fixed), backward

    def product(self, product: Matmul, *, tokens: int, result_bytes: int | None = None) -> Tally:
        """One of the three products of a matrix.

        Args:
            tokens: That take part, as m or as k.
            result_bytes: As of `matmul_ns`.
        """
        return self._kernel(product, (tokens + self.conf.matmul_fixed_tokens) / tokens, result_bytes)

    def batched(self, product: Matmul) -> tuple[Tally, Tally]:
        """Forward and backward of a product of two activations, such as attention's."""
        left, right = transposed(product)
        return self._kernel(product), self._kernel(left) + self._kernel(right)

    def _kernel(self, product: Matmul, factor: float = 1.0, result_bytes: int | None = None) -> Tally:
        if not product.m * product.n * product.num:
            return Tally()  # no result, no kernel: a rank that lends all units of a half has such products
        alone, busy = (
            factor * self.matmul_ns(product, result_bytes=result_bytes, busy=b) for b in (False, True)
        )
        launch = float(self.conf.launch_ns)
        return Tally(product.flop, alone, busy, launch, self.matmul_bytes(product, result_bytes), 1)

    def streamed(self, nbytes: float, kernels: int) -> Tally:
        """Kernels that only read and write memory."""
        gaps_ns = kernels * float(self.conf.launch_ns)
        return Tally(0, 0.0, 0.0, self.memory_ns(nbytes) + gaps_ns, float(nbytes), kernels)

    def flash(
        self, *, sequence: int, head_dim: int, num: int, causal: bool, flop: int
    ) -> tuple[Tally, Tally]:
        """Forward and backward of fused attention over `num` heads and sequences.

        Only blocks that a causal mask leaves are computed. A block of queries has a start and an end, which
        few keys do not hide (`flash_ramp`).

        Args:
            flop: As published figures count the forward: the whole square.
        """
        whole = 4.0 * sequence * sequence * head_dim * num
        keys = float(sequence)
        if causal:
            whole *= min(1.0, 0.5 * (1.0 + FLASH_TILE / sequence))
            keys /= 2.0
        ramp = (keys + self.conf.flash_ramp) / keys
        forward_ns = whole * ramp / (self.peak_flop_per_s * self.conf.flash_forward / self._pace) * 1e9
        backward_ns = (
            FLASH_BACKWARD
            * whole
            * ramp
            / (self.peak_flop_per_s * self.conf.flash_backward / self._pace)
            * 1e9
        )
        moved = 4.0 * sequence * head_dim * num * self.element_bytes
        return (
            self._flash_kernel(flop, forward_ns, moved, 1),
            self._flash_kernel(2 * flop, backward_ns, 2.0 * moved, 3),
        )

    def _flash_kernel(self, flop: int, ns: float, nbytes: float, kernels: int) -> Tally:
        ns = max(ns, self.memory_ns(nbytes))
        sms = self.conf.sms
        left = (sms - self.conf.collective_sms) / sms if sms else 1.0
        busy_ns = ns / left * self.conf.busy_slowdown
        return Tally(flop, ns, busy_ns, kernels * float(self.conf.launch_ns), nbytes, kernels)


def slowest_of(num: int) -> float:
    """Expected maximum of `num` standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


def transposed(product: Matmul) -> tuple[Matmul, Matmul]:
    """The two products of a backward: for the left operand and for the right one."""
    kind, m, n, k, num = product.kind, product.m, product.n, product.k, product.num
    return Matmul(f"{kind}.left", m, k, n, num), Matmul(f"{kind}.right", k, n, m, num)
