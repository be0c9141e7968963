"""FAISS indices find what nearest finds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from training_runs import config_of

from kge_torchrec import api
from kge_torchrec.answers import nearest
from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import KGEError


@pytest.mark.parametrize("scorer", ["distmult", "transe_l1", "transe_l2"])
def test_exact_index_matches_nearest(run, tmp_path, monkeypatch, scorer):
    faiss = pytest.importorskip("faiss", reason="indices need faiss-cpu")
    monkeypatch.setattr(nearest, "ROWS", 10)
    config = config_of(run.config.data.path, tmp_path / "run", train__epochs=1,
                       model__scorer=scorer, model__biases=True, model__dim=10)  # fmt: skip
    with api.train(config) as other:
        about = other.write_index(tmp_path / "i.faiss", "Flat")
        assert json.loads((tmp_path / "i.faiss.json").read_text()) == about
        assert about["entities"] == 37 and about["dim"] == 8
        read = faiss.read_index(str(tmp_path / "i.faiss"))
        labels = Vocabulary.open(tmp_path / about["labels"])
        ((place,),) = (labels.ids(["e3"]),)
        _, results = read.search(read.reconstruct(int(place))[None], 6)
        expected = [n.label for n in other.nearest("e3", 5)]
        assert [x for x in labels.labels(results[0]) if x != "e3"][:5] == expected


def test_trained_kinds_work_and_unknown_kinds_are_rejected(model, tmp_path):
    faiss = pytest.importorskip("faiss", reason="indices need faiss-cpu")
    model.write_index(tmp_path / "hnsw")
    model.write_index(tmp_path / "ivf", "IVF2,Flat")
    assert faiss.read_index(str(tmp_path / "ivf")).ntotal == 37
    with pytest.raises(ConfigError, match="FAISS cannot make an index 'Nonsense'"):
        model.write_index(tmp_path / "x", "Nonsense")
    with pytest.raises(OSError, match="No such file"):
        model.write_index(tmp_path / "nowhere" / "x", "Flat")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{x}{end}" for x in ("hnsw", "ivf") for end in ("", ".json", ".labels.arrow")}
    assert np.isfinite(faiss.read_index(str(tmp_path / "hnsw")).reconstruct(3)).all()


def test_symbolic_link_to_an_index_is_kept(model, tmp_path, monkeypatch):
    """With a stand-in for FAISS, which is not installed everywhere."""
    faiss = SimpleNamespace(write_index=lambda index, file: Path(file).write_text(index))
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "index")
    for text in ("one", "two"):
        about = {"labels": "link.labels.arrow", "kind": text}
        builder = nearest.IndexBuilder(8, "Flat", "METRIC_L2")
        builder.index = text
        nearest._write(model.model, builder, tmp_path / "link", about)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "index").read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {
        "disk", "link", "link.json", "link.labels.arrow"
    }  # fmt: skip
    assert len(list((tmp_path / "disk").iterdir())) == 1


def test_missing_faiss_is_reported(model, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(KGEError, match=r"pip install 'kge-torchrec\[index\]'"):
        model.write_index(tmp_path / "x")
