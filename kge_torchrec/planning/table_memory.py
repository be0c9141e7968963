"""Bytes of a shard of the entity table: values, optimizer state and cache, and where they lie.

After FBGEMM's split_table_batched_embeddings_ops_training (1.6 to 1.8): state is float32 whatever
the values are; with rows in main memory ("unified virtual memory", UVM) state of D numbers a row
lies there too, while state of one number a row stays on the GPU; the cache holds values only.
TorchRec's own estimate (1.8) counts the state in the type of the values, in the cache as well.

Shapes: n rows and d columns of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass

# Numbers of state for each number of the table, and for each row.
STATE_NUMBERS = {
    "adam": (2, 0),
    "rowwise_adam": (1, 1),
    "adagrad": (1, 0),
    "rowwise_adagrad": (0, 1),
    "sgd": (0, 0),
}
VALUE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
FUSED, UVM, UVM_CACHING, DENSE = "fused", "fused_uvm", "fused_uvm_caching", "dense"

_CACHE_WAYS = 32  # rows of a set; the cache holds whole sets


@dataclass(frozen=True)
class Bytes:
    """Bytes on the GPU and in main memory; a CPU's ranks have main memory only."""

    device: int = 0
    main: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.main + other.main)


@dataclass(frozen=True)
class TableForm:
    """How rows and optimizer state are kept.

    kernel: FUSED (rows on the device), UVM (rows in main memory), UVM_CACHING (main memory with a
        cache on the GPU), or DENSE (data-parallel: whole gradients and torch's own optimizer).
    cache_ratio: share of the rows that the cache of UVM_CACHING holds.
    state_bytes: of one number of state; 2 for the hand-rolled engine's bfloat16 state.
    counts_rows: whether each row counts its steps in an int32 (the hand-rolled engine's
        bias_correction row).
    state_in_main: whether all state is kept in main memory (its state_device cpu).
    """

    optimizer: str
    kernel: str = FUSED
    cache_ratio: float = 0.0
    value_bytes: int = 4
    state_bytes: int = 4
    counts_rows: bool = False
    state_in_main: bool = False

    def row_state_bytes(self, columns: int) -> int:
        """Bytes of state of one row of a shard."""
        each, row = STATE_NUMBERS[self.optimizer]
        return (each * columns + row) * self.state_bytes + (4 if self.counts_rows else 0)


def table_memory(rows: int, columns: int, form: TableForm, is_cuda: bool) -> dict[str, Bytes]:
    """Bytes of a shard of n rows by part: "weights", "optimizer state", "cache", "gradients"."""
    values = rows * columns * form.value_bytes
    if form.kernel == DENSE:
        return _dense_table(rows * columns, form, is_cuda)
    state = rows * form.row_state_bytes(columns)
    if not is_cuda:
        return {"weights": Bytes(main=values), "optimizer state": Bytes(main=state)}
    parts = {"weights": _in(form.kernel == FUSED, values)}
    _, row = STATE_NUMBERS[form.optimizer]
    if form.state_in_main:
        parts["optimizer state"] = Bytes(main=state)
    elif form.kernel == FUSED:
        parts["optimizer state"] = Bytes(device=state)
    else:
        by_row = rows * row * form.state_bytes
        parts["optimizer state"] = Bytes(device=by_row, main=state - by_row)
    if form.kernel == UVM_CACHING:
        parts["cache"] = Bytes(device=_cache(rows, columns, form))
    return parts


def _dense_table(numbers: int, form: TableForm, is_cuda: bool) -> dict[str, Bytes]:
    """A replica that DDP keeps equal: its gradient has the size of the table.

    Its optimizer is the dense one, which has no state by row.
    """
    return {
        "weights": _in(is_cuda, numbers * form.value_bytes),
        "optimizer state": _in(is_cuda, numbers * 4 * dense_state_numbers(form.optimizer)),
        "gradients": _in(is_cuda, numbers * form.value_bytes),
    }


def dense_state_numbers(optimizer: str) -> int:
    """Numbers of state for each dense parameter: those of the optimizer without state by row."""
    return {"adam": 2, "rowwise_adam": 2, "adagrad": 1, "rowwise_adagrad": 1, "sgd": 0}[optimizer]


def _cache(rows: int, columns: int, form: TableForm) -> int:
    """Cached values, their ids and use (int64 each a slot), and the table of each row (int32)."""
    if not rows:
        return 0
    sets = max(1, -(-int(rows * form.cache_ratio) // _CACHE_WAYS))
    slots = sets * _CACHE_WAYS
    return slots * (columns * form.value_bytes + 16) + 4 * rows


def _in(on_device: bool, size: int) -> Bytes:
    return Bytes(device=size) if on_device else Bytes(main=size)
