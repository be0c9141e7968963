"""Deliberate faults of graphs that grow, and of vectors from elsewhere; as in faults.py."""

from faults import Fault

FAULTS = [
    Fault("inverses stay behind the old relations", "training/growth.py",
          "after[block * new : block * new + old]", "after[block * old : block * old + old]",
          "tests/growth/test_extend.py -k old_rows"),
    Fault("frozen rows step where all entities are candidates", "embeddings/all_to_all/table.py",
          "step_parts(part.without(self.pending.frozen) for part in gradients)",
          "step_parts(gradients)", "tests/growth/test_extend.py -k frozen_rows"),
    Fault("frozen rows of TorchRec's table step where all entities are candidates",
          "embeddings/torchrec/cpu_table.py", "self.update(part.without(self.pending.frozen))",
          "self.update(part)", "tests/growth/test_extend.py -k frozen_rows"),
    Fault("momentum moves frozen relations", "distributed/dense.py",
          "            part[rows] = numbers", "            pass",
          "tests/growth/test_extend.py -k frozen_rows"),
    Fault("frozen rows count in the clipped norm", "training/gradients.py",
          "            self.backend.dense.frozen.drop_gradients()", "            pass",
          "tests/growth/test_extend.py -k dense_oracle"),
    Fault("replay draws the same old triples every epoch", "data/shuffle.py",
          "EpochShuffle(old, seed + 1, epoch)", "EpochShuffle(old, seed + 1, 0)",
          "tests/data/test_extended_store.py -k replay"),
    Fault("placing forgets old queries", "growth/placement.py",
          "for queries in self.old_queries if len(block) else ():", "for queries in ():",
          "tests/growth/test_placement.py"),
    Fault("vectors of a shard that starts elsewhere", "training/warm_start.py",
          "shard.rows[ids[here] - shard.first_row, : own.shape[1]] = own",
          "shard.rows[ids[here] % len(shard.rows), : own.shape[1]] = own",
          "tests/training/test_warm_start.py -k ranks_read"),
    Fault("two vectors of a label: the last one is taken", "data/vectors.py",
          "    if counts.max() > 1:", "    if False:",
          "tests/training/test_warm_start.py -k wrong_with"),
]  # fmt: skip
