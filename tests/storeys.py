"""Imports the engine, trains, ranks and predicts with a copy of the package without applications.

Arguments: the folder of the copy, and the rooms of the engine, separated by commas.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np


def main(copy: Path, rooms: list[str]) -> None:
    for file in sorted((copy / "kge_torchrec").rglob("*.py")):
        module = file.relative_to(copy).with_suffix("").parts
        if module[1] in rooms and module[-1] != "__init__":
            importlib.import_module(".".join(module))

    from kge_torchrec.config.parser import config_from_dict
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.ranking.topk import Queries
    from kge_torchrec.training.runs import resume_run, start_run
    from kge_torchrec.training.session import load_trained

    keys = {"data.path": "countries", "run.dir": str(copy / "run"), "model.dim": 8,
            "train.epochs": 1, "train.batch_size": 1024, "run.progress": False}  # fmt: skip
    folder = start_run(config_from_dict(keys))
    folder = resume_run(folder.path, {"train.epochs": 2})
    config = folder.load_config()
    with processes("cpu") as ranks:
        model, progress, _ = load_trained(config, folder, ranks)
        assert progress.epoch == 2
        valid = np.asarray(model.known("a test").valid)
        ranked = model.ranks_of(valid, "valid", config.evaluation)
        assert len(ranked.optimistic["tail"]) == len(valid)
        head, relation = model.entity_ids(["Austria"]), model.relation_ids(["borders"])
        _, ids = model.best(Queries(head, relation, "tail"), 3)
        assert len(set(model.entity_labels.labels(ids[0].numpy()))) == 3
    loaded = {name.split(".")[1] for name in sys.modules if name.startswith("kge_torchrec.")}
    assert loaded <= {*rooms}, loaded - {*rooms}


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    main(Path(sys.argv[1]), sys.argv[2].split(","))
