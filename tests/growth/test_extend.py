"""Extended runs against a dense oracle: old rows and their state, new rows, what stays."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch
from grown_runs import (
    FIRST,
    OLD_ENTITIES,
    TABLE,
    TOLERANCE,
    base_config,
    base_run,
    featured_run,
    new_triples,
    tensors,
)
from oracle_training import train_dense
from training_runs import fit, random_triples
from worlds import run_world

from kge_torchrec import api, extend
from kge_torchrec.config import ConfigError
from kge_torchrec.config.parser import load_config
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import KGEError
from kge_torchrec.models.scorers.bilinear import DistMult
from kge_torchrec.training.run_folder import RunFolder

RELATIONS = "model.objective.scorer.relations"
VARIANTS = {
    "all": {},
    "freeze": {"freeze": True},
    "clipped": {"freeze": True, "overrides": {"train.clip.norm": 0.01}},
}


def rank_extends(run: Path, folder: Path, engine: str, features: Path | None) -> None:
    for name, inputs in VARIANTS.items():
        overrides = {"entities.engine": engine, **inputs.get("overrides", {})}
        inputs = {**inputs, "overrides": overrides, "features": features}
        extend(run, new_triples(), folder / name, epochs=2, **inputs)


@pytest.mark.parametrize(
    ("world_size", "engine", "has_features"),
    [(1, "torchrec", False), (2, "handrolled", True), (4, "torchrec", False)],
)
def test_continued_training_matches_dense_oracle(tmp_path, world_size, engine, has_features):
    run = featured_run() if has_features else base_run()
    features = run.parent / "new.tsv" if has_features else None
    run_world(world_size, rank_extends, run, tmp_path, engine, features)
    for name in VARIANTS:
        check_training(tmp_path / name, name)


def check_training(run: Path, name: str) -> None:
    start, end, store = tensors(run, FIRST), tensors(run), TripleStore.open(run / "store")
    old = [*range(store.base.entities),
           *range(store.num_entities, store.num_entities + store.base.features)]  # fmt: skip
    old_relations = [i for i in range(10) if i % 5 < store.base.relations]
    freezes, state = bool(VARIANTS[name].get("freeze")), "optimizer."
    frozen = {"frozen": old, "frozen_relations": old_relations} if freezes else {}
    expected = train_dense(
        RunFolder(run).load_config(),
        store,
        {"entities": start[TABLE], "relations": start[RELATIONS]},
        squares=(start[f"{state}entities.embeddings.entity.weight.entity.momentum1"],
                 start[f"{state}objective.scorer.relations.sum"]),
        **frozen,
    )  # fmt: skip
    for key, values in ((TABLE, expected["entities"]), (RELATIONS, expected["relations"])):
        assert (values - start[key]).abs().max() > 0.02  # it has learnt something
        assert (values - end[key]).abs().max() < TOLERANCE, name
    for key, before in start.items() if freezes else ():
        if "entity" in key:  # and their state
            assert torch.equal(end[key][old], before[old])
        elif ".relations" in key and before.dim():
            assert torch.equal(end[key][old_relations], before[old_relations])


def rank_freezes(run: Path, folder: Path, overrides: dict) -> None:
    extend(run, new_triples(), folder, epochs=1, freeze=True, overrides=overrides)


@pytest.mark.parametrize(
    "ranks, changes, overrides",
    [(1, {"negatives__regime": "kvsall", "entities__engine": "handrolled"}, {}),
     (1, {"train__optimizer": "adam", "model__scorer": "conve", "model__dim": 12}, {}),
     (1, {"train__accumulation": 2, "train__precision": "fp16"}, {}),
     (2, {"train__optimizer": "adam"},
      {"dense.wrapper": "fsdp", "train.optimizer_options.weight_decay": 0.1})],
    ids=str,
)  # fmt: skip
def test_frozen_rows_stay_bitwise_equal(tmp_path, ranks, changes, overrides):
    run_world(ranks, rank_freezes, base_run(**changes), tmp_path / "run", overrides)
    start, end = tensors(tmp_path / "run", FIRST), tensors(tmp_path / "run")
    moved = 0
    for key, old in start.items():
        new = end[key]
        if "entity" in key and new.dim():
            assert torch.equal(new[:OLD_ENTITIES], old[:OLD_ENTITIES])
            moved += int((new[OLD_ENTITIES:] != old[OLD_ENTITIES:]).sum())
        elif "objective" in key and new.dim():
            if len(new) == 10:  # relations and their inverses, three old ones each
                new, old = (x.view(2, 5, -1) for x in (new, old))
                assert not torch.equal(new[:, 3:], old[:, 3:]), key
                new, old = new[:, :3], old[:, :3]
            assert torch.equal(new, old)
    assert moved


def test_extended_run_supports_all_verbs(tmp_path):
    made = extend(base_run(), new_triples(), tmp_path / "run", epochs=1)
    new = made.results["extended"]["new"]
    assert new == {"entities": 9, "relations": 2, "training triples": 58}
    assert (tmp_path / "run" / "plan.txt").is_file()
    (tmp_path / "run").rename(tmp_path / "moved")  # its store is its own
    on = api.resume(tmp_path / "moved", {"train.epochs": 2})
    assert on.results["train"]["epochs"] == 2
    assert len(on.predict(head="n0", relation="new0", k=3)) == 3
    again = extend(on.path, {"train": [("n0", "r0", "z")]}, tmp_path / "again", epochs=0)
    assert again.model.store.base.entities == OLD_ENTITIES + 9
    (tmp_path / "moved" / "store").rename(tmp_path / "stored")
    with api.open_run(tmp_path / "moved", data=tmp_path / "stored") as run:
        assert len(run.predict(head="n0", relation="new0", k=3)) == 3


def test_config_of_an_extended_run_reads_its_store(tmp_path):
    """Its reading keys say how `extend` reads; a new run of this config reads nothing."""
    lines = "".join(f"{t}\t{r}\t{h}\n" for h, r, t in random_triples(9, 2, 60))
    (tmp_path / "graph.tsv").write_text(lines)
    keys = {"data__columns": "head=2,relation=1,tail=0", "train__epochs": 1}
    run = api.train(base_config(tmp_path / "graph.tsv", tmp_path / "run", **keys)).path
    for name, entity in (("more", "z"), ("again", "y")):  # an extended run, extended
        (tmp_path / "new.tsv").write_text(f"{entity}\tr0\te1\n")
        run = extend(run, tmp_path / "new.tsv", tmp_path / name, epochs=0).path
        assert run.name == name
    config = load_config(run, ["--run.dir", str(tmp_path / "next")])
    assert config.data.columns is None and config.data.path == str(run / "store")
    assert RunFolder(run).load_config().data.columns == keys["data__columns"]
    assert api.train(config).model.num_entities == 11
    with pytest.raises(ConfigError, match=r"data.columns .* has no effect here"):
        load_config(run, ["--data.columns", "head=0,relation=1,tail=2"])


def test_rejected_extension_leaves_no_files(tmp_path):
    """Others are in bad_inputs.tsv."""
    run, known = base_run(), ("e0", "r0", random_triples(37, 3, 150)[0][2])
    with pytest.raises(KGEError, match="none of the triples is new"):
        extend(run, {"train": [known]}, tmp_path / "run")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("train: {epochs: null}")  # in a race
    with pytest.raises(KGEError, match="no checkpoint yet: train it first"):
        extend(tmp_path / "old", new_triples(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(KGEError, match=r"train.extension.freeze old: .* is no extended store"):
        fit(base_config(run.parent / "store", tmp_path / "x", train__extension__freeze="old"))


def test_extension_inherits_settings(tmp_path):
    """A tenth of the epochs, rounded up, and values that were null; validations begin anew."""
    for epochs, expected in ((2, 1), (11, 2)):
        run = base_run(train__batch_size=None, train__epochs=epochs, evaluation__every=1)
        overrides = {"evaluation.metric": "mr"}
        made = extend(run, new_triples(), tmp_path / f"run{epochs}", overrides=overrides)
        assert made.config.evaluation.metric == "mr"
        assert made.config.train.epochs == made.results["train"]["epochs"] == expected
        assert made.config.train.batch_size == RunFolder(run).load_config().train.batch_size


def test_nonfinite_rows_are_rejected(tmp_path):
    run = shutil.copytree(base_run(), tmp_path / "base")
    spoil(run)
    with pytest.raises(KGEError, match=r"entity.weight holds NaN or infinity, from .*--checkpoint"):
        extend(run, new_triples(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def spoil(run: Path) -> None:
    """Writes a NaN into the newest checkpoint's table, with right checksums."""
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    file, manifest = checkpoint / "rank-00000.safetensors", checkpoint / "manifest.json"
    about = json.loads(manifest.read_text())
    (piece,) = about["tensors"][TABLE]
    content = bytearray(file.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    start, stop = json.loads(content[8:data])[f"{TABLE}@0"]["data_offsets"]
    content[data + start : data + start + 4] = struct.pack("f", float("nan"))
    file.write_bytes(content)
    piece[3] = zlib.crc32(content[data + start : data + stop])
    del about["crc32"]
    manifest.write_text(json.dumps(about | {"crc32": zlib.crc32(json.dumps(about).encode())}))


class Transposed(DistMult):
    """DistMult and a parameter with a column for each relation."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        num_relations = len(self.relations)
        self.columns = torch.nn.Parameter(torch.ones(7, num_relations))


def test_parameters_that_are_not_by_relation_take_no_new_relations(tmp_path):
    run = base_run(model__scorer=f"{__name__}:Transposed", model__reciprocal=False)
    with pytest.raises(KGEError, match=r"columns of scorer .* is not by relation"):
        extend(run, new_triples(), tmp_path / "new")
    old = {"train": [t for t in new_triples()["train"] if t[1] in ("r0", "r2")]}
    made = extend(run, old, tmp_path / "run", epochs=0).path
    name = "model.objective.scorer.columns"
    assert torch.equal(tensors(run)[name], tensors(made, FIRST)[name])
