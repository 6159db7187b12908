"""From a config to a layout policy, with every size that must divide checked."""

from ...conf.schema import ParallelConf
from ..mesh import divisors
from .megatron import MegatronLayout

RECOMPUTE = ("none", "selective", "full")


def data_size(conf: ParallelConf, *, num_ranks: int) -> int:
    """Replicas of the model.

    Raises:
        ValueError: If data, tensor and pipeline do not multiply to the ranks.
    """
    model = conf.tensor * conf.pipeline
    if num_ranks % model:
        raise ValueError(
            f"parallel.tensor={conf.tensor} times parallel.pipeline={conf.pipeline} must divide the "
            f"{num_ranks} ranks of the cluster; their product can be one of {divisors(num_ranks)}"
        )
    if conf.data not in (-1, num_ranks // model):
        raise ValueError(
            f"parallel.data={conf.data} must be -1 or {num_ranks // model}: parallel.data times "
            f"parallel.tensor={conf.tensor} times parallel.pipeline={conf.pipeline} are the {num_ranks} ranks of "
            "the cluster"
        )
    return num_ranks // model


def build_layout(
    conf: ParallelConf,
    *,
    num_ranks: int,
    micro_batches: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    sequence: int,
    tied: bool,
    recompute: str = "none",
) -> MegatronLayout:
    """The policy that `conf` describes.

    Args:
        vocab: Rows of the embedding that are shared out; a model pads it beforehand.
        sequence: Tokens of one sequence.
        recompute: "none", "selective" or "full".

    Raises:
        ValueError: If a mode is not built yet, or a size does not divide, naming the keys.
    """
    if conf.tensor_mode != "1d":
        raise ValueError(
            f"parallel.tensor_mode={conf.tensor_mode} with engine=megatron, which has 1d alone: use "
            "parallel.tensor_mode=1d, or engine=fsdp2"
        )
    if conf.sequence_mode != "megatron":
        raise ValueError(
            f"parallel.sequence_mode={conf.sequence_mode} with engine=megatron, which has megatron alone: use "
            "parallel.sequence_mode=megatron, or engine=fsdp2"
        )
    if conf.sequence not in (1, conf.tensor):
        raise ValueError(
            f"parallel.sequence={conf.sequence} must be 1 or parallel.tensor={conf.tensor}: with "
            "parallel.sequence_mode=megatron the ranks of a tensor group share the tokens"
        )
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute}: a tensor-parallel layout takes one of {list(RECOMPUTE)}")
    data_size(conf, num_ranks=num_ranks)
    shared = {"model.heads": heads, "model.kv_heads": kv_heads, "model.ffn": ffn, "model.vocab": vocab}
    if conf.sequence > 1:
        shared["batch.sequence"] = sequence
    for key, value in shared.items():
        if value % conf.tensor:
            raise ValueError(
                f"parallel.tensor={conf.tensor} must divide {key}={value}{_padded(key, value, conf)}"
            )
    return MegatronLayout(
        name=f"t{conf.tensor}p{conf.pipeline}",
        num_layers=layers,
        micro_batches=micro_batches,
        stages=conf.pipeline,
        chunks=conf.virtual_stages,
        schedule=conf.pipeline_schedule,
        tensor=conf.tensor,
        sequence=conf.sequence > 1,
        overlap=conf.tensor_overlap,
        recompute=recompute,
        tied=tied,
    )


def _padded(key: str, value: int, conf: ParallelConf) -> str:
    """What Megatron makes of a vocabulary: --make-vocab-size-divisible-by 128, times the tensor group."""
    if key != "model.vocab":
        return ""
    block = 128 * conf.tensor
    return f"; Megatron pads the table to a multiple of 128 * {conf.tensor}: model.vocab={-(-value // block) * block}"
