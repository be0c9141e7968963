"""Rows of a shard where they lie and where they are scored."""

import torch

from kge_torchrec.embeddings.backend import EntityShard


def test_rows_are_scored_elsewhere():
    """A table on disk is mapped into main memory, and scored on a GPU."""
    rows, elsewhere = torch.arange(12.0).view(6, 2), torch.device("meta")
    shard = EntityShard(rows, 0, 6, scored_on=elsewhere)
    for places in (slice(1, 3), torch.tensor([4, 0])):
        assert shard.own(places).device == elsewhere
        assert torch.equal(EntityShard(rows, 0, 6).own(places), rows[places])
    assert shard.device == elsewhere and EntityShard(rows, 0, 6).device == rows.device
