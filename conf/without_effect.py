"""Keys that were set, and that nothing reads: said in a warning."""

from dataclasses import fields
from enum import Enum

from .schema import (
    Attention,
    Backend,
    ClusterConf,
    DeepSpeedConf,
    Engine,
    ExperimentConf,
    GoodputConf,
    GradientPath,
    LambCorrection,
    Launch,
    MomentumOrder,
    NcclConf,
    NodeKind,
    OptimizerConf,
    ParallelConf,
    Precision,
    Recompute,
    SlowdownBy,
    Target,
)
from .schema.parallel import AXES

# key, value, default, whether something reads it, and what that takes
Reader = tuple[str, object, object, bool, str]


def without_effect(experiment: ExperimentConf) -> list[str]:
    """Keys that were set, and that nothing reads in this experiment."""
    comm, train, optimizer = experiment.comm, experiment.train, experiment.optimizer
    family = comm.policy is None
    target = experiment.target
    qgz = "comm.zero_quantized_gradients=true"
    goodput = experiment.goodput
    failing = goodput.node_mtbf_h is not None
    readers: list[Reader] = [
        (
            "comm.weight_bits",
            comm.weight_bits,
            8,
            comm.zero_quantized_weights,
            "comm.zero_quantized_weights=true",
        ),
        (
            "comm.weight_block",
            comm.weight_block,
            2048,
            comm.zero_quantized_weights,
            "comm.zero_quantized_weights=true",
        ),
        *(
            (f"comm.{key}", getattr(comm, key), default, comm.zero_quantized_gradients, qgz)
            for key, default in (
                ("gradient_path", GradientPath.two_hop),
                ("gradient_bits", [4, 4]),
                ("gradient_block", 256),
            )
        ),
        (
            "comm.hpz_lifetime",
            comm.hpz_lifetime,
            None,
            comm.zero_hpz_partition_size != 1,
            "hpZ",
        ),
        (
            "comm.quantize_node_copy",
            comm.quantize_node_copy,
            None,
            comm.zero_quantized_weights and comm.zero_hpz_partition_size != 1,
            "qwZ and hpZ",
        ),
        ("comm.zero_quantized_weights", comm.zero_quantized_weights, False, family, "comm.policy=null"),
        ("comm.zero_quantized_gradients", comm.zero_quantized_gradients, False, family, "comm.policy=null"),
        (
            "comm.overlap",
            comm.overlap,
            False,
            experiment.cluster.backend is Backend.gloo,
            "cluster.backend=gloo",
        ),
        *_of_the_optimizer(optimizer),
        ("train.loss_scale", train.loss_scale, 0.0, experiment.precision is Precision.fp16, "precision=fp16"),
        (
            "train.lr_min_fraction",
            train.lr_min_fraction,
            0.1,
            train.lr_schedule != "constant",
            "train.lr_schedule",
        ),
        ("train.eval_batches", train.eval_batches, 4, train.eval_every > 0, "train.eval_every"),
        (
            "data.validation_fraction",
            experiment.data.validation_fraction,
            0.1,
            experiment.data.name == "text",
            "data=text",
        ),
        *(
            (
                f"deepspeed.{key.name}",
                getattr(experiment.deepspeed, key.name),
                key.default,
                experiment.engine in (Engine.deepspeed, Engine.deepspeed_2023),
                "engine=deepspeed or deepspeed_2023",
            )
            for key in fields(DeepSpeedConf)
        ),
        ("launch", experiment.launch, Launch.local, target is not Target.sim, "target=runtime or both"),
        *(
            (
                f"kernels.{key}",
                getattr(experiment.kernels, key),
                None,
                target is not Target.runtime,
                "target=sim or both",
            )
            for key in ("attention", "fusion", "dropout")
        ),
        *_of_the_stragglers(experiment),
        *_of_the_network(experiment.cluster),
        *_of_the_layout(experiment),
        *(
            (f"goodput.{key.name}", getattr(goodput, key.name), key.default, failing, "goodput.node_mtbf_h")
            for key in fields(GoodputConf)
        ),
        (
            "cluster.device.price_per_hour",
            experiment.cluster.device.price_per_hour,
            None,
            train.tokens is not None,
            "train.tokens",
        ),
    ]
    return [
        f"{key}={value.value if isinstance(value, Enum) else value} has no effect without {needs}"
        for key, value, default, read, needs in readers
        if value != default and not read
    ]


def _of_the_optimizer(optimizer: OptimizerConf) -> list[Reader]:
    lamb = (("lamb",), "optimizer=lamb")
    lars = (("lars",), "optimizer=lars")
    both = (("lamb", "lars"), "optimizer=lamb or lars")
    readers: dict[str, tuple[tuple[str, ...], str]] = {
        "momentum": (("sgd", "lars"), "optimizer=sgd or lars"),
        "eps": (("adamw", "lamb", "lars"), "optimizer=adamw, lamb or lars"),
        **dict.fromkeys(("bias_correction", "max_norm", "min_norm"), lamb),
        **dict.fromkeys(("eeta", "clip"), lars),
        **dict.fromkeys(("max_coeff", "min_coeff", "exclude_1d"), both),
    }
    decays = optimizer.name == "lamb" and optimizer.weight_decay > 0
    corrects = optimizer.name == "lamb" and optimizer.bias_correction
    sums = optimizer.name == "lars" and optimizer.momentum > 0
    return [
        *(
            (
                f"optimizer.{key.name}",
                getattr(optimizer, key.name),
                key.default,
                optimizer.name in names,
                needs,
            )
            for key in fields(OptimizerConf)
            if key.name in readers
            for names, needs in [readers[key.name]]
        ),
        (
            "optimizer.betas",
            list(optimizer.betas),
            [0.9, 0.95],
            optimizer.name in ("adamw", "lamb"),
            "optimizer=adamw or lamb",
        ),
        (
            "optimizer.decay_in_ratio",
            optimizer.decay_in_ratio,
            True,
            decays,
            "optimizer=lamb and optimizer.weight_decay",
        ),
        (
            "optimizer.correction",
            optimizer.correction,
            LambCorrection.moments,
            corrects,
            "optimizer=lamb and optimizer.bias_correction",
        ),
        (
            "optimizer.momentum_order",
            optimizer.momentum_order,
            MomentumOrder.after_rate,
            sums,
            "optimizer=lars and optimizer.momentum",
        ),
    ]


def _of_the_stragglers(experiment: ExperimentConf) -> list[Reader]:
    cluster, usual = experiment.cluster, SlowdownBy.device
    given, repeats = cluster.slowdown is not None, cluster.slowdown_by is SlowdownBy.repeat
    shared = experiment.parallel.tensor > 1 and experiment.parallel.tensor_mode == "1d"
    products = (
        "parallel.tensor > 1 with parallel.tensor_mode=1d, whose products are repeated: no rank is slow"
    )
    return [
        ("cluster.slowdown_by", cluster.slowdown_by, usual, given, "cluster.slowdown"),
        ("cluster.slowdown_by", cluster.slowdown_by, usual, not (given and repeats) or shared, products),
    ]


def _of_the_network(cluster: ClusterConf) -> list[Reader]:
    inner, outer = cluster.intra_node, cluster.inter_node
    nccl, leaves = cluster.backend is Backend.nccl, 0 < outer.nodes_per_leaf < cluster.nodes
    more = f"cluster.nodes > cluster.inter_node.nodes_per_leaf={outer.nodes_per_leaf} > 0"
    return [
        ("cluster.inter_node.oversubscription", outer.oversubscription, 1.0, leaves, more),
        ("cluster.inter_node.rails", outer.rails, False, nccl, "cluster.backend=nccl"),
        ("cluster.wan_Bps", cluster.wan_Bps, None, cluster.sites > 1, "cluster.sites > 1"),
        ("cluster.wan_latency_ns", cluster.wan_latency_ns, 0, cluster.sites > 1, "cluster.sites > 1"),
        (
            "cluster.intra_node.host_Bps",
            inner.host_Bps,
            None,
            inner.kind is not NodeKind.nvswitch,
            "cluster.intra_node.kind=pcie or nvlink_pairs",
        ),
        *(
            (f"cluster.nccl.{key.name}", getattr(cluster.nccl, key.name), value, nccl, "cluster.backend=nccl")
            for key in fields(NcclConf)
            for value in [getattr(NcclConf(), key.name)]
        ),
    ]


def _of_the_layout(experiment: ExperimentConf) -> list[Reader]:
    parallel, usual = experiment.parallel, ParallelConf()
    megatron = experiment.engine is Engine.megatron
    torch = experiment.engine is Engine.fsdp2
    both = "engine=fsdp2 or megatron and "
    apart = parallel.sequence_mode != "megatron" and parallel.sequence > 1
    ring = torch and apart and parallel.sequence_mode == "ring"
    causal = experiment.model.family not in ("bert", "vit")
    piped, tensor = parallel.pipeline > 1, parallel.tensor > 1
    readers = {
        "pipeline_schedule": ((megatron or torch) and piped, f"{both}parallel.pipeline > 1"),
        "stage_layers": (torch and piped, "engine=fsdp2 and parallel.pipeline > 1"),
        "pipeline_overlap": (megatron and piped, "engine=megatron and parallel.pipeline > 1"),
        "virtual_stages": ((megatron or torch) and piped, f"{both}parallel.pipeline > 1"),
        "tensor_mode": (tensor, "parallel.tensor > 1"),
        "tensor_overlap": (
            megatron and tensor,
            "engine=megatron and parallel.tensor > 1",
        ),
        "sequence_mode": (parallel.sequence > 1, "parallel.sequence > 1"),
        "zigzag": (
            ring and causal,
            "parallel.sequence > 1, parallel.sequence_mode=ring and a model whose tokens see only those before them",
        ),
        "order": (_orders(experiment), "two axes of more than one rank whose order it changes"),
    }
    return [
        *(
            (f"parallel.{key}", getattr(parallel, key), getattr(usual, key), read, needs)
            for key, (read, needs) in readers.items()
        ),
        (
            "parallel.tensor_mode",
            parallel.tensor_mode,
            usual.tensor_mode,
            parallel.tensor_mode != "2.5d" or parallel.depth > 1 or not tensor,
            "parallel.depth > 1: it is 2d",
        ),
        (
            # flash attention keeps no scores that could be computed again, and does so itself
            "recompute",
            experiment.recompute,
            Recompute.none,
            experiment.recompute is not Recompute.selective or not _flash(experiment),
            "kernels.attention=unfused",
        ),
        (
            "kernels.reduce_fp32",
            experiment.kernels.reduce_fp32,
            False,
            experiment.engine is Engine.fsdp2,
            "engine=fsdp2",
        ),
    ]


def _orders(experiment: ExperimentConf) -> bool:
    """Whether parallel.order puts axes of more than one rank in another order than the usual one."""
    parallel = experiment.parallel
    sizes = {
        "tensor": parallel.tensor,
        "sequence": parallel.sequence if parallel.sequence_mode != "megatron" else 1,
        "data": experiment.cluster.num_ranks // parallel.ranks_a_replica,
        "pipeline": parallel.pipeline,
    }
    given, usual = ([axis for axis in order if sizes[axis] > 1] for order in (parallel.order, AXES))
    return experiment.engine is Engine.fsdp2 and given != usual


def _flash(experiment: ExperimentConf) -> bool:
    """Whether attention is one kernel: given, or what the engine's programs use."""
    given = experiment.kernels.attention
    if given is not None:
        return given is Attention.flash
    return experiment.engine not in (Engine.megatron, Engine.deepspeed_2023)
