"""The largest values that make sense, and the check of one key."""

# Beyond these nothing would ever end, or fit: they catch slips of the keyboard
MAX_STEPS = 10_000_000
MAX_LAYERS = 100_000
MAX_RANKS = 1_000_000
MAX_MICRO_BATCHES = 100_000
MAX_CHUNKS = 1024  # far more than a pipeline of messages can use
MAX_SEED = 2**63 - 1  # torch takes no larger one
MAX_LOSS_SCALE = 2.0**24  # apex' max_loss_scale: gradients above 65504 / scale overflow fp16
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 86_400.0


def require(ok: bool, key: str, value: object, legal: str) -> None:
    if not ok:
        raise ValueError(f"{key}={value!r}: must be {legal}")
