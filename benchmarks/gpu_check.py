"""What one GPU can show of this package, in less than 8 minutes: `make gpu-check`.

    python benchmarks/gpu_check.py            on a machine with a CUDA GPU
    python benchmarks/gpu_check.py --rehearse the same code on CPU tensors of toy sizes: its figures mean nothing

Kernels against the reference and against a device copy, a hierarchical quantized reduce-scatter on streams, FSDP2's
hooks on the device, two processes that share the GPU, matmuls against the simulator's model, copies to and from the
host, and a training whose states lie in the host's memory. It ends with what one GPU cannot show, and exits with 1 if a
check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinbed.kernels import (
    code_bytes,
    decode_segments,
    dequantize_blocks,
    dequantize_reduce,
    dequantize_reduce_quantize,
    encode_segments,
    encode_with_feedback,
    prepare,
    prepare_gpu,
    pruned_matmul,
    slice_order,
    wire_bytes,
)

LIMIT_s = 480
FORMATS = ((8, 2048), (4, 256))
NUM_SLICES = 8
GOAL_OF_COPY = 0.8  # on a data-centre GPU
NODES, LOCAL = 2, 4  # of the virtual ranks
TIE = 1e-6  # integers may differ by a step where a quotient is so near a tie; counted


@dataclass
class Check:
    """Where the checks run, and what came of them."""

    device: torch.device
    numel: int  # of the large tensors
    failures: list[str] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, what: str, passed: bool) -> None:
        print(f"  {'ok    ' if passed else 'FAILED'} {what}", flush=True)
        if not passed:
            self.failures.append(what)

    def sample(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(dtype).to(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Median of one call, warm."""
        for _ in range(3):
            call()
        times = []
        for _ in range(20 if self.cuda else 3):
            if self.cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
        else:
            with torch.cuda.stream(stream):
                yield


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on CPU tensors of toy sizes")
    parser.add_argument("--rank", nargs=2, metavar=("RANK", "STORE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not arguments.rehearse and not torch.cuda.is_available():
        sys.exit(
            f"gpu-check needs a CUDA GPU, and torch {torch.__version__} sees none here "
            "(--rehearse runs the same code on the CPU)"
        )
    if arguments.rehearse:
        check = Check(torch.device("cpu"), numel=1 << 16)
    else:
        check = Check(torch.device("cuda", 0), numel=1 << 26)
        torch.cuda.set_device(0)
    if arguments.rank:
        return _shared_rank(check, int(arguments.rank[0]), arguments.rank[1])
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT_s)
    started = time.monotonic()
    name = torch.cuda.get_device_name(0) if check.cuda else "REHEARSAL on a CPU: figures mean nothing"
    print(f"{name}, torch {torch.__version__}")
    ready = prepare()
    print(f"CPU kernels: {ready.backend}, {ready.reason} ({ready.seconds:.1f} s)")
    if check.cuda:
        ready = prepare_gpu(check.device)
        print(f"GPU kernels: {ready.backend}, {ready.reason} ({ready.seconds:.1f} s)")
        check.say("Triton serves the GPU", ready.backend == "triton")
    for part in (_equality, _speed, _streams, _hooks, _shared, _matmuls, _host_copies, _offload):
        title = (part.__doc__ or "").splitlines()[0].rstrip(".")
        print(f"\n{title}", flush=True)
        try:
            part(check)
        except Exception as err:  # one part's failure shall not hide the others
            check.say(f"{part.__name__.strip('_')}: {type(err).__name__}: {err}", False)
    print(
        "\nOne GPU cannot show: NCCL between GPUs and between nodes (rings, trees, NVLink, InfiniBand), collectives\n"
        "that take multiprocessors from products, gathers that overlap computation, the rails of several network\n"
        "cards, offload by GPUs that share the host's memory and PCIe, stragglers among devices.\n"
        "On several: torchrun --nproc-per-node=GPUS examples/attach_gpt2.py zeropp, and twinbed-probe."
    )
    print(f"\n{time.monotonic() - started:.0f} s; {len(check.failures)} of the checks failed")
    for failure in check.failures:
        print(f"  {failure}")
    return 1 if check.failures else 0


def _equality(check: Check) -> None:
    """Kernels against the plain-torch reference on the device, and against the native code of the CPU."""
    for bits, block in (*FORMATS, (8, 36), (4, 12)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            segments = (4099, 0, 1, 255, 70_001)
            options: dict[str, Any] = {"segments": segments, "bits": bits, "block": block}
            x = check.sample(8, sum(segments), dtype=dtype, seed=bits)
            x[:, 300:700] *= 1e-4
            x[1, 5000:5300] = 0.0
            order = slice_order(2, 4)
            ours = encode_segments(x, **options, order=order)
            plain = encode_segments(x, **options, order=order, reference=True)
            apart = int((ours != plain).sum())
            near, far = (0, 0) if not apart else near_ties(x[list(order)], ours, plain, options)
            native = encode_segments(x.cpu(), **options, order=order)
            values = torch.equal(
                decode_segments(ours, **options, dtype=dtype),
                decode_segments(ours, **options, dtype=dtype, reference=True),
            )
            sums = torch.equal(
                dequantize_reduce(ours, x[0], **options),
                dequantize_reduce(ours, x[0], **options, reference=True),
            )
            again = torch.equal(
                dequantize_reduce_quantize(ours, x[0], **options),
                dequantize_reduce_quantize(ours, x[0], **options, reference=True),
            )
            error, theirs = torch.zeros_like(x), torch.zeros_like(x)
            for _ in range(2):
                one = encode_with_feedback(x, error, **options)
                other = encode_with_feedback(x, theirs, **options, reference=True)
            feedback = torch.equal(one, other) and torch.equal(error, theirs)
            check.say(
                f"{bits} bits, block {block}, {dtype}: {apart} bytes apart ({near} codes near a tie, {far} not); "
                f"decode {values}, reduce {sums}, requantize {again}, feedback {feedback}, CPU equal "
                f"{torch.equal(ours.cpu(), native)}",
                not far and values and sums and again and feedback,
            )
    kept = tuple(torch.randperm(512, generator=torch.Generator().manual_seed(0))[:300].tolist())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        x, w = check.sample(300, 512, dtype=dtype), check.sample(512, 130, dtype=dtype, seed=1)
        results = []
        for reference in (False, True):
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            pruned_matmul(a, b, kept, reference=reference).square().sum().backward()
            results.append((a.grad, b.grad))
        off = max(float((o - p).norm() / p.norm()) for o, p in zip(*results, strict=True) if p is not None)
        check.say(f"pruned matmul {dtype}: gradients off by {off:.1e} (relative)", off < tolerance)


def near_ties(x: Tensor, ours: Tensor, plain: Tensor, options: dict[str, Any]) -> tuple[int, int]:
    """Codes that differ by one step because the quotient is near a tie, and those that differ for another reason.

    Args:
        x: Rows, as they were encoded.
        ours, plain: Their messages by the kernel and by the reference.
    """
    near = far = 0
    (numel,), bits, block = options["segments"], options["bits"], options["block"]
    ones = torch.ones(-(-numel // block), device=x.device)
    split = code_bytes(numel, bits=bits, block=block)

    def codes(message: Tensor) -> Tensor:
        fmt = {"bits": bits, "block": block, "numel": numel, "dtype": torch.float32}
        return dequantize_blocks(message[:split], ones, **fmt, reference=True).double()

    for row, a, b in zip(x, ours, plain, strict=True):
        scales = b[split:].clone().view(torch.float32).double().repeat_interleave(block)[:numel]
        steps = (codes(a) - codes(b)).abs()
        quotient = row.double() / scales
        tie = (quotient - quotient.floor() - 0.5).abs() <= TIE
        near += int(((steps == 1) & tie).sum())
        far += int(((steps > 1) | ((steps == 1) & ~tie)).sum())
        far += int((a[split:] != b[split:]).sum())  # a scale is no code
    return near, far


def _speed(check: Check) -> None:
    """Kernels' bytes read and written per second against a copy on the device."""
    n = check.numel
    source = torch.randint(255, (n,), dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    copy_Bps = 2 * n / check.seconds(lambda: target.copy_(source))
    print(f"  copy of {n / 1e6:.0f} MB: {copy_Bps / 1e9:.0f} GB/s read and written")
    for bits, block in FORMATS:
        for dtype in (torch.bfloat16, torch.float32):
            options: dict[str, Any] = {"segments": (n // 8,), "bits": bits, "block": block}
            x = check.sample(8, n // 8, dtype=dtype)
            message = encode_segments(x, **options)
            values, error = torch.empty_like(x), torch.zeros_like(x)
            nbytes = x.nbytes + message.nbytes
            calls: dict[str, tuple[int, Callable[..., object]]] = {
                "quantize": (nbytes, partial(encode_segments, x, **options, out=message)),
                "quantize in slice order": (
                    nbytes,
                    partial(encode_segments, x, **options, order=slice_order(2, 4), out=message),
                ),
                "dequantize": (nbytes, partial(decode_segments, message, **options, out=values)),
                "with feedback": (
                    nbytes + 2 * error.nbytes,
                    partial(encode_with_feedback, x, error, **options, out=message),
                ),
            }
            if dtype == torch.float32:
                total = torch.empty(n // 8, device=check.device)
                one = torch.empty(
                    wire_bytes(n // 8, bits=bits, block=block), dtype=torch.uint8, device=check.device
                )
                calls[f"reduce {NUM_SLICES} slices"] = (
                    message.nbytes + total.nbytes,
                    partial(dequantize_reduce, message, **options, out=total),
                )
                calls[f"reduce and quantize {NUM_SLICES} slices"] = (
                    message.nbytes + one.nbytes,
                    partial(dequantize_reduce_quantize, message, **options, out=one),
                )
            for name, (moved, call) in calls.items():
                seconds = check.seconds(call)
                share = moved / seconds / copy_Bps
                eager = check.seconds(partial(call, reference=True)) / seconds
                goal = "goal met" if share >= GOAL_OF_COPY else "below the goal of 0.8"
                print(
                    f"  {name:30}{bits} bits {str(dtype)[6:]:9}{moved / seconds / 1e9:>7.0f} GB/s{share:>6.2f} of copy"
                    f"{eager:>6.1f}x eager   {goal}",
                    flush=True,
                )


def _streams(check: Check) -> None:
    """A hierarchical quantized reduce-scatter of 8 virtual ranks, each on streams of its own, against the CPU."""
    ranks, n = NODES * LOCAL, 10_007
    options: dict[str, Any] = {"segments": (n,), "bits": 4, "block": 256}
    gradients = check.sample(ranks, ranks, n)  # rank, slice
    expected = _qgz(gradients.cpu(), options, [None] * ranks, [None] * ranks, check)
    for attempt in range(3):
        compute = [torch.cuda.Stream() for _ in range(ranks)] if check.cuda else [None] * ranks
        wire = [torch.cuda.Stream() for _ in range(ranks)] if check.cuda else [None] * ranks
        found = _qgz(gradients, options, compute, wire, check)
        if check.cuda:
            torch.cuda.synchronize()
        check.say(f"attempt {attempt}: {ranks} ranks equal the CPU", torch.equal(found.cpu(), expected))
    exact = gradients.sum(0).cpu()
    off = float((expected - exact).norm() / exact.norm())
    check.say(f"the sum is off by {off:.2f} (relative; 4 bits twice)", off < 0.35)


def _qgz(
    gradients: Tensor, options: dict[str, Any], compute: Sequence[Any], wire: Sequence[Any], check: Check
) -> Tensor:
    """Two hops; each rank's messages are copied on its wire stream, as a collective would move them."""
    ranks = NODES * LOCAL
    order = slice_order(NODES, LOCAL)

    def then(first: Any, second: Any) -> None:
        if first is not None:
            second.wait_stream(first)

    for stream in compute:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
    first_hop = []
    for rank in range(ranks):
        with check.on(compute[rank]):
            first_hop.append(encode_segments(gradients[rank], **options, order=order))
    received: list[Tensor] = []
    for rank in range(ranks):
        node, local = divmod(rank, LOCAL)
        for peer in range(node * LOCAL, (node + 1) * LOCAL):
            then(compute[peer], wire[rank])
        with check.on(wire[rank]):
            places = slice(local * NODES, (local + 1) * NODES)
            peers = [first_hop[peer][places] for peer in range(node * LOCAL, (node + 1) * LOCAL)]
            received.append(torch.stack(peers))  # peer, node, wire
        then(wire[rank], compute[rank])
    second_hop = []
    for rank in range(ranks):
        with check.on(compute[rank]):
            second_hop.append(
                torch.stack(
                    [dequantize_reduce_quantize(received[rank][:, node], **options) for node in range(NODES)]
                )
            )
    last_hop, results = [], []
    for rank in range(ranks):
        node, local = divmod(rank, LOCAL)
        peers_of = [other * LOCAL + local for other in range(NODES)]
        for peer in peers_of:
            then(compute[peer], wire[rank])
        with check.on(wire[rank]):
            last_hop.append(torch.stack([second_hop[peer][node] for peer in peers_of]))
        then(wire[rank], compute[rank])
        with check.on(compute[rank]):
            results.append(dequantize_reduce(last_hop[rank], **options))
    for stream in (*compute, *wire):
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
    for tensor in (gradients, *first_hop, *received, *second_hop, *last_hop, *results):
        for stream in (*compute, *wire):
            if stream is not None:
                tensor.record_stream(stream)
    return torch.stack(results)


def _hooks(check: Check) -> None:
    """FSDP2 with this package's collectives, on its own streams, in a world of one."""
    from torch.distributed.fsdp import fully_shard

    import twinbed.runtime

    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if check.cuda else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            losses: dict[str, list[float]] = {}
            for name in ("plain", "zero3", "zeropp"):
                torch.manual_seed(0)
                model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(check.device)
                mesh = dist.device_mesh.init_device_mesh(check.device.type, (1,))
                for layer in model:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
                if name != "plain":
                    with warnings.catch_warnings():  # that keys have no effect on one rank is known
                        warnings.simplefilter("ignore")
                        twinbed.runtime.attach(model, name, ranks_per_node=1)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                losses[name] = []
                for step in range(5):
                    loss = model(check.sample(64, 256, seed=step)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses[name].append(float(loss.detach()))
            for name in ("zero3", "zeropp"):
                off = max(abs(a / b - 1) for a, b in zip(losses[name], losses["plain"], strict=True))
                check.say(f"{name}: losses within {off:.1e} of plain FSDP2", off < 1e-3)
        finally:
            dist.destroy_process_group()


def _shared(check: Check) -> None:
    """Two processes that share the device; messages go through the host, as NCCL refuses two ranks on one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        flags = [] if check.cuda else ["--rehearse"]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *flags, "--rank", str(rank), store],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        for rank, process in enumerate(processes):
            try:
                out, _ = process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            last = out.strip().splitlines()[-1:] or ["no output"]
            check.say(f"rank {rank}: {last[0]}", process.returncode == 0)


def _shared_rank(check: Check, rank: int, store: str) -> int:
    from datetime import timedelta

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    n = 300_007
    options: dict[str, Any] = {"segments": (n,), "bits": 4, "block": 256}
    mine = check.sample(2, n, seed=rank)
    side = torch.cuda.Stream() if check.cuda else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with check.on(side):
        outgoing = encode_segments(mine, **options, order=(1 - rank,))
        staged = torch.empty(outgoing.shape, dtype=torch.uint8, pin_memory=check.cuda)
        staged.copy_(outgoing, non_blocking=True)
    if side is not None:
        side.synchronize()
    incoming = torch.empty_like(staged)
    work = [dist.irecv(incoming, 1 - rank), dist.isend(staged, 1 - rank)]
    for one in work:
        assert one is not None
        one.wait()
    total = dequantize_reduce(incoming.to(check.device), mine[rank], **options)
    other = torch.randn(2, n, generator=torch.Generator().manual_seed(1 - rank))
    message = encode_segments(other, **options, order=(rank,))
    expected = dequantize_reduce(message, mine[rank].cpu(), **options)
    equal = torch.equal(total.cpu(), expected)
    dist.barrier()
    dist.destroy_process_group()
    print(
        f"own slice plus the other process's quantized one {'equal' if equal else 'differ from'} the CPU's sum"
    )
    return 0 if equal else 1


def _matmuls(check: Check) -> None:
    """Matmuls: the simulator's model against this device."""
    from twinbed.conf.model_flop import Matmul
    from twinbed.sim.device import Device

    half = torch.bfloat16
    if check.cuda and torch.cuda.get_device_capability()[0] < 8:
        half = torch.float16
    conf, known = _device_conf(check, half)
    device = Device(conf, element_bytes=2)
    shapes = (
        (8192, 8192, 8192),
        (4096, 12288, 4096),
        (2048, 4096, 16384),
        (8192, 1024, 4096),
        (512, 4096, 4096),
    )
    if not check.cuda:
        shapes = ((128, 128, 128), (64, 256, 128))
    off = []
    for m, n, k in shapes:
        a, b = check.sample(m, k, dtype=half), check.sample(k, n, dtype=half, seed=1)
        measured_s = check.seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        predicted_s = (device.matmul_ns(Matmul("check", m, n, k)) + conf.launch_ns) / 1e9
        off.append(abs(predicted_s / measured_s - 1))
        print(
            f"  {m:>6} x {k:>6} x {n:>6}: measured {measured_s * 1e6:>8.0f} us "
            f"({2 * m * n * k / measured_s / 1e12:.0f} TFLOP/s), "
            f"predicted {predicted_s * 1e6:>8.0f} us ({predicted_s / measured_s:.2f})"
        )
    middle = statistics.median(off)
    if known:
        check.say(f"median error of the model: {middle:.0%} (at most 15%)", middle <= 0.15)
    else:
        print(
            f"  median error with the first shape's rate: {middle:.0%}; no figures of this device are in conf/cluster"
        )


def _device_conf(check: Check, half: torch.dtype) -> tuple[Any, bool]:
    """The configuration of a device like this one; else a plain one at a measured rate."""
    from twinbed.conf.compose import compose
    from twinbed.conf.schema import DeviceConf

    name = torch.cuda.get_device_name(0) if check.cuda else ""
    for part, cluster in (
        ("H100", "dgx_h100"),
        ("H200", "dgx_h100"),
        ("A100", "dgx_a100"),
        ("V100", "dgx2_v100"),
    ):
        if part in name:
            print(f"  figures of conf/cluster/{cluster}.yaml")
            conf = compose(["target=sim", f"cluster={cluster}"]).experiment.cluster.device
            return conf, True
    size = 8192 if check.cuda else 128
    a, b = check.sample(size, size, dtype=half), check.sample(size, size, dtype=half, seed=1)
    rate = 2 * size**3 / check.seconds(lambda: a @ b)
    sms = torch.cuda.get_device_properties(0).multi_processor_count if check.cuda else 0
    return DeviceConf(
        name=name or "cpu", flop_per_s=rate, matmul_efficiency=1.0, sms=sms, memory_Bps=1e12
    ), False


def _host_copies(check: Check) -> None:
    """Copies between host and device, which offload is made of."""
    if not check.cuda:
        print("  no device to copy to")
        return
    nbytes = 1 << 28
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=check.device)
    for pinned in (True, False):
        on_host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
        up = nbytes / check.seconds(partial(on_device.copy_, on_host, non_blocking=True))
        down = nbytes / check.seconds(partial(on_host.copy_, on_device, non_blocking=True))
        torch.cuda.synchronize()
        kind = "pinned" if pinned else "pageable"
        print(f"  {kind:9} host to device {up / 1e9:.1f} GB/s, device to host {down / 1e9:.1f} GB/s")


def _offload(check: Check) -> None:
    """FSDP2 with weights, gradients and optimizer states in the host's memory, as offload=cpu trains."""
    from torch.distributed.fsdp import fully_shard

    import twinbed.runtime
    from twinbed.conf.schema import OffloadConf
    from twinbed.runtime.offload.host import host_memory

    places = {"none": OffloadConf(), "pageable": OffloadConf(name="cpu", pinned=False)}
    if check.cuda:  # only a driver pins memory
        places["pinned"] = OffloadConf(name="cpu")
    width, layers = (1024, 8) if check.cuda else (64, 3)
    losses: dict[str, list[float]] = {}
    held_bytes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if check.cuda else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = dist.device_mesh.init_device_mesh(check.device.type, (1,))
            for name, conf in places.items():
                gc.collect()
                before_bytes = torch.cuda.memory_allocated() if check.cuda else 0
                torch.manual_seed(0)
                model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(check.device)
                policy = host_memory(conf)
                options: dict[str, Any] = {} if policy is None else {"offload_policy": policy}
                for layer in model:
                    fully_shard(layer, mesh=mesh, **options)
                fully_shard(model, mesh=mesh, **options)
                with warnings.catch_warnings():  # that keys have no effect on one rank is known
                    warnings.simplefilter("ignore")
                    twinbed.runtime.attach(model, "zero3", ranks_per_node=1)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                losses[name], times = [], []
                for step in range(5):
                    start = time.perf_counter()
                    loss = model(check.sample(64, width, seed=step)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses[name].append(float(loss.detach()))  # waits for the device
                    times.append(time.perf_counter() - start)
                if check.cuda:
                    held_bytes[name] = torch.cuda.memory_allocated() - before_bytes
                states = [
                    *model.parameters(),
                    *(
                        value
                        for state in optimizer.state.values()
                        for key, value in state.items()
                        if key != "step"
                    ),
                ]
                where = "cpu" if conf.active else check.device.type
                astray = sum(getattr(x, "_local_tensor", x).device.type != where for x in states)
                check.say(
                    f"{name}: {len(states) - astray} of {len(states)} weights and moments on {where}; "
                    f"{statistics.median(times) * 1e3:.1f} ms a step",
                    astray == 0 and len(states) == 3 * 2 * layers,
                )
                del model, optimizer, states, loss, layer
        finally:
            dist.destroy_process_group()
    states_bytes = 12 * layers * (width + 1) * width  # weight and two moments, fp32
    for name in places:
        if name == "none":
            continue
        # the host's cores step what lies there: the same formula, in another order
        off = max(abs(a / b - 1) for a, b in zip(losses[name], losses["none"], strict=True))
        check.say(f"{name}: losses within {off:.1e} of those without offload", off < 1e-4)
        if check.cuda:
            share = (held_bytes["none"] - held_bytes[name]) / states_bytes
            check.say(
                f"{name}: {share:.0%} of the states' bytes left the device (at least 80%)", share >= 0.8
            )


def _too_long(signum: int, frame: object) -> None:
    raise SystemExit(f"gpu-check took longer than {LIMIT_s} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
