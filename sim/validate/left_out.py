"""Published figures that are no rows of ours, and why: a reader should know what was not compared."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeftOut:
    """`figures`: how many were printed."""

    what: str
    figures: int
    source: str
    reason: str


_PRESS = "github hpcaitech/public_assets colossalai/img"
_NO_HARDWARE = "neither GPU nor nodes are printed"

LEFT_OUT = (
    LeftOut(
        "GPT-2, memory of a GPU on 8, 16 and 64",
        6,
        f"{_PRESS}/GPT2.png",
        f"{_NO_HARDWARE}, nor model, layout and precision",
    ),
    LeftOut(
        "GPT-2 of 345M to 8.3B on 8 to 512 GPUs, TFLOP/s",
        8,
        f"{_PRESS}/GPT2.png",
        f"read off a plot without labels; {_NO_HARDWARE}, nor batch and layout",
    ),
    LeftOut(
        "GPT-2 on 1 to 4 GPUs, largest model and throughput against DeepSpeed",
        12,
        f"{_PRESS}/(updated)GPT-2.png",
        f"throughput without a unit; {_NO_HARDWARE}; offload to host memory is not simulated",
    ),
    LeftOut(
        "BERT with sequence parallelism on 4 to 16 GPUs, tokens/s and longest sequence",
        18,
        f"{_PRESS}/BERT.png",
        f"each system at its own largest batch, which is not printed; {_NO_HARDWARE}; ring sequence parallelism is "
        "not simulated",
    ),
    LeftOut(
        "ViT with 64 GPUs in a tensor group, throughput by mode",
        4,
        f"{_PRESS}/ViT.png",
        f"throughput without a unit, batches read off a plot; {_NO_HARDWARE}; 2D and 2.5D tensor parallelism are not "
        "simulated",
    ),
    LeftOut(
        "OPT against DeepSpeed, speed-ups on 1 and 8 GPUs",
        6,
        _PRESS,
        f"{_NO_HARDWARE}, nor batch; offload to host memory is not simulated",
    ),
    LeftOut(
        "LLaMA and mixtures of experts, speed-ups",
        4,
        "Colossal-AI README",
        f"headlines: what they are measured against is not said; {_NO_HARDWARE}",
    ),
    LeftOut(
        "ViT-Lite and ViT-S on 8 A100, time to train",
        2,
        "ColossalAI-Benchmark README",
        "rounded, with data loading and augmentation, which are not simulated; precision is not said",
    ),
    LeftOut(
        "BERT with tensor parallelism 8, out of memory",
        1,
        "arXiv 2105.13120, weak scaling table",
        "no figure: the table says OOM",
    ),
    LeftOut(
        "BERT, largest batch and sequence, Linformer",
        8,
        "arXiv 2105.13120, text and figures",
        "ratios at largest batches that are not printed; Linformer is not simulated",
    ),
    LeftOut(
        "2D, 2.5D and 3D tensor parallelism: speed-ups",
        10,
        "abstracts of arXiv 2110.14883, 2104.05343, 2105.14500, 2105.14450",
        "these modes are not simulated, and the tables behind the ratios could not be read",
    ),
    LeftOut(
        "ZeRO++ with and without its own quantization kernel and fused kernels, TFLOP/s",
        5,
        "arXiv 2306.10209, ablation of kernels",
        "unverified: no text with the table could be read; model, GPUs and links of it are not known",
    ),
    LeftOut(
        "ZeRO-3, hpZ and MiCS on 4 nodes, TFLOP/s",
        7,
        "arXiv 2306.10209, comparison with MiCS",
        "unverified, a weak recollection; MiCS is not simulated",
    ),
    LeftOut(
        "ZeRO++ on 64 to 384 GPUs, TFLOP/s",
        2,
        "arXiv 2306.10209, scaling figure and introduction",
        "the figure could not be read; what a note gives of the introduction contradicts the tables",
    ),
    LeftOut(
        "RLHF with ZeRO++: training and generation",
        12,
        "DeepSpeed blogs/zeropp and deepspeed-chat",
        "generation and LoRA are not simulated; batch and sequence are not printed",
    ),
    LeftOut(
        "successors of ZeRO++ (on MI250X, SDP4Bit, LoCo), speed-ups",
        5,
        "abstracts of arXiv 2501.04266, 2410.15526, 2407.04480",
        "no cluster of MI250X is described here, and their quantizers are not simulated",
    ),
)
