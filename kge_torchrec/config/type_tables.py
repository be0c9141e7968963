"""Settings of the entity table of one node type, in place of those of all entities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kge_torchrec.config.checks import PICKED, PickedFloat, PickedText, choice, positive
from kge_torchrec.config.keys import key
from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import check_name, resolve
from kge_torchrec.config.sizing import rate_of, scale_of

_KEY = "entities.tables"
INIT_NAMES = ("normal", "uniform", "xavier_normal", "xavier_uniform")


@dataclass(frozen=True)
class TypeTable:
    """Settings of the entities of one type."""

    optimizer: PickedText = key(PICKED, "Optimizer of the table; null: train.optimizer.")
    lr: PickedFloat = key(
        PICKED,
        "Learning rate; null: train.lr, or what suits an optimizer that is given here.",
        check=positive,
    )
    optimizer_options: dict[str, Any] = key(
        dict, "Options of the optimizer; null: those of train, unless an optimizer is given here."
    )
    init: PickedText = key(
        PICKED,
        "Distribution of the initial values; null: model.init.",
        check=choice(*INIT_NAMES),
    )
    init_scale: PickedFloat = key(
        PICKED,
        "Scale of the initial values; null: model.init_scale, or what is usual for an init that is "
        "given here.",
        check=positive,
    )

    @classmethod
    def parse(cls, name: str, values: Any) -> TypeTable:
        """Return the settings of a type from ``entities.tables``.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        table: TypeTable = parse_options(cls, values or {}, f"{_KEY}.{name}")
        if table.optimizer is not None:
            check_name("table_optimizer", table.optimizer)
        return table

    def completed(self, name: str, train: Any, model: Any) -> TypeTable:
        """Return the settings with those of all entities where they are null.

        Args:
            name: The type.
            train: The section ``train`` of the config, without nulls.
            model: The section ``model`` of the config, without nulls.
        """
        same = self.optimizer in (None, train.optimizer)
        optimizer = train.optimizer if self.optimizer is None else self.optimizer
        options = self.optimizer_options or (train.optimizer_options if same else {})
        init = model.init if self.init is None else self.init
        scale = model.init_scale if init == model.init else scale_of(init)
        return replace(
            self,
            optimizer=optimizer,
            lr=self.lr or (train.lr if same else rate_of(optimizer)),
            optimizer_options=parse_options(
                resolve("table_optimizer", optimizer), options, f"{_KEY}.{name}.optimizer_options"
            ),
            init=init,
            init_scale=self.init_scale or scale,
        )
