"""A prediction in one call, for scripts and notebooks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..analysis.record import Record
from ..conf.compose import Composed, compose, from_hydra
from ..conf.schema import ExperimentConf
from .simulate import simulate

if TYPE_CHECKING:
    from omegaconf import DictConfig


def predict(config: Sequence[str] | Mapping[str, Any] | Composed = ()) -> Record:
    """Simulate one experiment in this process, without writing anything.

    Args:
        config: Overrides as on the command line, e.g. `["model=gpt_18b", "cluster=dgx2_v100"]`; or a composed
            Hydra config; or what `conf.compose.compose` returned.

    Returns:
        The record that `target=sim` would write: `record.result` holds the keys of `result.json` (times in
        seconds, sizes in bytes), `record.ledger` the collectives.

    Raises:
        ValueError: If a key, a value or a combination is not legal.
    """
    if isinstance(config, Composed):
        composed = config
    elif isinstance(config, Mapping):
        composed = from_hydra(_typed(config))
    else:
        composed = compose(["target=sim", *config])
    record = simulate(composed.experiment, spec=composed.spec, resolved=composed.resolved)
    record.result["warnings"] = [*composed.warnings, *record.result["warnings"]]
    return record


def _typed(config: Mapping[str, Any]) -> "DictConfig":
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        typed = OmegaConf.merge(OmegaConf.structured(ExperimentConf), dict(config))
    except OmegaConfBaseException as err:
        known = sorted(ExperimentConf.__dataclass_fields__)
        first = str(err).split("\n", 1)[0]
        raise ValueError(f"{err.full_key or 'config'}: {first}; the keys on top are {known}") from err
    assert isinstance(typed, DictConfig)
    missing = sorted(str(key) for key in OmegaConf.missing_keys(typed))
    if missing:
        raise ValueError(
            f"{missing[0]}: must be given (missing: {missing}); pass a composed config, or a list of overrides such "
            "as ['model=gpt_18b'], which begins with the defaults"
        )
    return typed
