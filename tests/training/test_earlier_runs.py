"""Settings that are refused or mean something else now: runs trained with them still open."""

from __future__ import annotations

import logging

import pytest
import yaml
from training_runs import config_of, tiny_store

from kge_torchrec import api
from kge_torchrec.commands import run_verb
from kge_torchrec.config import ConfigError


def rewrite(run: api.Run, change) -> None:
    """Changes config.yaml's values, as if another version had written them."""
    file = run.path / "config.yaml"
    values = yaml.safe_load(file.read_text())
    change(values)
    file.write_text(yaml.safe_dump(values))
    run.close()


@pytest.mark.parametrize("sides, query_side", [("tail", "head"), ("head", "tail")])
@pytest.mark.first_tier("head-tail")
def test_one_side_with_reciprocal_relations_is_rejected(tmp_path, sides, query_side):
    keys = {"negatives__sides": sides, "train__epochs": 1}
    with pytest.raises(ConfigError, match=f"negatives.sides {sides}: .* {query_side} queries use"):
        api.train(config_of("countries", tmp_path / "run", **keys))
    assert not (tmp_path / "run").exists()
    store = tiny_store(tmp_path / "store").path
    single = config_of(store, tmp_path / "run", model__reciprocal=False, **keys)
    with api.train(single) as run:  # the same relations answer both sides
        assert run.results["test"].keys() == {"head", "tail", "both"}


@pytest.mark.parametrize("verb", ["plan", "compare"])
def test_verbs_without_training_reject_one_side(verb):
    arguments = ["demo", "--negatives.sides", "tail"]
    if verb == "plan":
        arguments += ["--devices", "8xH100-80GB"]
    with pytest.raises(ConfigError, match=r"negatives.sides tail: with model.reciprocal"):
        run_verb(verb, arguments)


def test_run_with_one_side_opens_with_a_warning(tmp_path, caplog):
    store = tiny_store(tmp_path / "store").path
    run = api.train(config_of(store, tmp_path / "run", train__epochs=1))
    rewrite(run, lambda values: values["negatives"].update(sides="tail"))
    caplog.clear()  # of what training has said of the data
    with caplog.at_level(logging.WARNING, "kge_torchrec"), api.open_run(run.path) as old:
        assert old.evaluate() == run.results["test"]
        assert len(old.predict(head="e0", relation="r0", k=3)) == 3
        old.export(tmp_path / "export")
    ours = [record for record in caplog.records if record.name.startswith("kge_torchrec")]
    said = [record.getMessage() for record in ours]
    assert len(said) == 1 and "never trained the relations of head queries" in said[0]
    with pytest.raises(ConfigError, match=r"set negatives.sides both"):
        api.resume(run.path, {"train.epochs": 2})
    with api.resume(run.path, {"train.epochs": 2, "negatives.sides": "both"}) as mended:
        assert mended.results["train"]["epochs"] == 2
