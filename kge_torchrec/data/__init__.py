"""From files of triples to the batches of a rank."""

from typing import Literal

ENTITY = "entity"  # name of the entity table and of its only feature, in every backend
Side = Literal["head", "tail"]  # the missing one, which a query asks for
SIDES: tuple[Side, ...] = ("head", "tail")
