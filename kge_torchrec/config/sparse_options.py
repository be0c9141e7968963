"""Options in which the hand-rolled sparse optimizer can differ from FBGEMM's.

Three presets name what published systems do:

    fbgemm  FBGEMM's fused kernels; with it both engines give the same parameters
    dicee   dice-embeddings' sparse Adam: each shard counts the steps in which it had rows, epsilon
            is added before the bias of the second moment is corrected (as torch's SparseAdam does),
            moments are kept in bfloat16 in main memory, the step runs in a thread
    dgl     DGL's distributed SparseAdam and SparseAdagrad: the mean over duplicates, a step count a
            row, epsilon inside Adagrad's root
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kge_torchrec.config.registry import KINDS, resolve

_CHOICES = {
    "duplicates": ("sum", "mean"),
    "bias_correction": ("table", "row", "shard"),
    "epsilon": ("outside", "inside", "uncorrected"),
    "state_dtype": ("fp32", "bf16"),
    "state_rounding": ("stochastic", "nearest"),
    "state_device": ("same", "cpu"),
    "async_step": (True, False),
}


@dataclass(frozen=True)
class SparseOptions:
    """Named choices of a sparse optimizer.  An unknown choice raises ValueError.

    Args:
        duplicates: gradients of one row in one step are summed, or averaged over the places of
            the batch that looked the row up.
        bias_correction: which steps the Adams count: ``table`` all of them, ``row`` those that
            touched the row, ``shard`` those in which this rank's shard had rows (its result
            depends on the number of ranks; there to reproduce others).
        epsilon: ``outside`` sqrt(v / c2) + eps, ``inside`` sqrt(v / c2 + eps), ``uncorrected``
            (Adams) (sqrt(v) + eps) / sqrt(c2).
        state_dtype: of the moments; bf16 halves their memory.
        state_rounding: of bf16: ``stochastic`` keeps small changes on average, ``nearest`` loses
            them, so that a second moment stalls at a quarter of its value.
        state_device: ``same`` as the table, or ``cpu``.
        async_step: step in a thread while the next batch is loaded; joined before rows are read.
    """

    duplicates: str = "sum"
    bias_correction: str = "table"
    epsilon: str = "outside"
    state_dtype: str = "fp32"
    state_rounding: str = "stochastic"
    state_device: str = "same"
    async_step: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(str(choice) for choice in choices)
                raise ValueError(f"{name}: {value!r} is none of {listed}")


FBGEMM = SparseOptions()
PRESETS = ("fbgemm", "dicee", "dgl")
_OF_STATE = ("epsilon", "state_dtype", "state_rounding", "state_device")
_OPTIMIZERS = {"dicee": ("adam",), "dgl": ("adam", "adagrad")}  # that the system has


def preset(name: str, optimizer: str) -> SparseOptions:
    """Return the options of a preset for a table optimizer.

    Raises ValueError for an unknown preset, and for an optimizer that its system does not have.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is none of {', '.join(PRESETS)}")
    if optimizer not in _OPTIMIZERS.get(name, (optimizer,)):
        have = " and ".join(_OPTIMIZERS[name])
        raise ValueError(f"preset: {name} has {have} only, not {optimizer}")
    if name == "dicee":
        return SparseOptions(
            bias_correction="shard",
            epsilon="uncorrected",
            state_dtype="bf16",
            state_rounding="nearest",
            state_device="cpu",
            async_step=True,
        )
    if name == "dgl":
        epsilon = "inside" if optimizer == "adagrad" else "outside"
        return SparseOptions(duplicates="mean", bias_correction="row", epsilon=epsilon)
    return FBGEMM


def choose(name: str, optimizer: str, **chosen: Any) -> SparseOptions:
    """Return a preset with some options replaced; None keeps the value of the preset.

    Raises ValueError, naming the option, for one that the optimizer has no use for.
    """
    chosen = {option: value for option, value in chosen.items() if value is not None}
    options, kind = preset(name, optimizer), resolve("table_optimizer", optimizer)
    options = SparseOptions(**{**asdict(options), **chosen})
    if "bias_correction" in chosen and not kind.corrects_bias:
        raise ValueError(f"bias_correction: {optimizer} corrects no bias, only the Adams do")
    if options.epsilon == "uncorrected" and not kind.corrects_bias:
        raise ValueError(f"epsilon: uncorrected is of the Adams, not of {optimizer}")
    if optimizer not in KINDS["table_optimizer"].ours:
        _refuse_for_foreign(optimizer, options)
    state_options = [option for option in _OF_STATE if option in chosen]
    if state_options and not kind.states:
        raise ValueError(f"{state_options[0]}: {optimizer} keeps no state")
    if "state_rounding" in chosen and options.state_dtype != "bf16":
        raise ValueError("state_rounding: only bf16 states are rounded; set state_dtype bf16")
    return options


def _refuse_for_foreign(optimizer: str, options: SparseOptions) -> None:
    """Check that an optimizer of another package gets sums of gradients and float32 states."""
    for option, value in asdict(options).items():
        if option != "async_step" and value != getattr(FBGEMM, option):
            raise ValueError(f"{option}: {optimizer} is not ours and takes its own step; leave it")
