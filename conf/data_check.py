"""What data and model must have in common, and what follows from data that have an end: epochs and validations."""

import math

from .model_spec import ModelSpec
from .schema import ExperimentConf
from .schema.limits import MAX_STEPS

_FASHION = {"image": (28, 28), "channels": 1, "classes": 10}
_USUAL_STEPS = ExperimentConf.__dataclass_fields__["steps"].default
_USUAL_BATCHES = 4  # of train.eval_batches


def check_data_fits(experiment: ExperimentConf, spec: ModelSpec) -> None:
    """Refuse pictures for a model that cannot take them.

    Raises:
        ValueError: Naming the model's key and what the data need.
    """
    if experiment.data.name != "fashion_mnist":
        return
    if spec.family != "vit" or not spec.classifies:
        raise ValueError(
            f"data=fashion_mnist with model={spec.name} of family {spec.family}: pictures need family vit with a "
            "classifier; use model=vit_fashion"
        )
    for key, needed in _FASHION.items():
        if getattr(spec, key) != needed:
            shown = needed[0] if isinstance(needed, tuple) else needed
            raise ValueError(
                f"model.extra.{key}={getattr(spec, key)} of model={spec.name}: must be {shown} with "
                "data=fashion_mnist, which has gray pictures of 28 x 28 in 10 classes; use model=vit_fashion"
            )


def resolve_epochs(experiment: ExperimentConf, *, num_replicas: int) -> None:
    """Set `steps` from `train.epochs`, `train.tokens` from both, and `train.eval_batches` from the test images.

    The last step is a whole one, and goes on with the images of the next epoch.

    Args:
        num_replicas: Of the model; each takes micro-batches of its own.

    Raises:
        ValueError: The data have no end, or another key contradicts what follows.
    """
    data, train, batch = experiment.data, experiment.train, experiment.batch
    at_once = batch.micro * num_replicas
    if train.epochs is not None:
        if data.num_train is None:
            raise ValueError(
                f"train.epochs={train.epochs:g} with data={data.name}, which has no end: give steps, or "
                "data=fashion_mnist"
            )
        global_sequences = at_once * batch.accumulation
        steps = math.ceil(train.epochs * data.num_train / global_sequences)
        if experiment.steps not in (_USUAL_STEPS, steps):
            raise ValueError(
                f"steps={experiment.steps} contradicts train.epochs={train.epochs:g}, which gives {steps} steps of "
                f"{global_sequences} images; leave one of them out"
            )
        if steps > MAX_STEPS:
            raise ValueError(
                f"train.epochs={train.epochs:g} gives {steps} steps: must be at most {MAX_STEPS}"
            )
        experiment.steps = steps
        if train.tokens is None and batch.sequence is not None:
            train.tokens = float(steps * global_sequences * batch.sequence)
    if data.num_test is not None and train.eval_every:
        needed = math.ceil(data.num_test / at_once)
        if train.eval_batches not in (_USUAL_BATCHES, needed):
            raise ValueError(
                f"train.eval_batches={train.eval_batches} contradicts data={data.name}, whose validation is all "
                f"data.num_test={data.num_test} images: {needed} batches of {at_once}; leave it out, or lower "
                "data.num_test"
            )
        train.eval_batches = needed
