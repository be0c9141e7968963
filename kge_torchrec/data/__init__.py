"""From files of triples to the batches of a rank."""

ENTITY = "entity"  # name of the entity table and of its only feature, in every engine
