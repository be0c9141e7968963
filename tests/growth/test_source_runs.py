"""No verb writes to a file of the run or store that it reads."""

from __future__ import annotations

from pathlib import Path

import torch
from grown_runs import FIRST, OLD_ENTITIES, TABLE, base_config, tensors
from starlette.testclient import TestClient
from training_runs import tiny_store

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.serving.app import create_app
from kge_torchrec.serving.server import opened_model


def content(*folders: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file, its bytes, and when it was written last."""
    return {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


# A verb may add the files named after it.
VERBS = (
    ("evaluate extended0", ()),
    ("predict run --queries asked.tsv -o x.tsv --format tsv", ()),
    ("calibrate run", ("calibration.json",)),
    ("export run -o export", ()),
    ("report run --no-models", ("report.html",)),
    ("data check store", ()),
    ("train run/config.yaml --model.init_from run --run.dir started", ()),
    ("tune run/config.yaml --trials 1 --study study --run.dir null", ()),
)


def test_sources_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = [tiny_store(tmp_path / "store").path, tmp_path / "run"]
    api.train(base_config(sources[0], sources[1], train__epochs=1)).close()
    Path("asked.tsv").write_text("e1\tr0\t?\n")
    new = ("n0\tr0\te1\ne2\tnew0\tn0\nn1\tr1\te3\n", "m0\tr0\tn1\nm0\tnew1\te4\nn0\tnew0\tm1\n",
           "k0\tr1\tm0\nk0\tnew2\tn1\n")  # fmt: skip
    for number, lines in enumerate(new):  # each run is extended again
        held, output = content(*sources), tmp_path / f"extended{number}"
        Path("new.tsv").write_text(lines)
        assert main(["extend", str(sources[-1]), "new.tsv", "-o", str(output), "--epochs=0"]) == 0
        assert content(*sources) == held
        sources.append(output)
    one, two, three = (tensors(run, FIRST)[TABLE] for run in sources[2:])
    assert [len(x) - OLD_ENTITIES for x in (one, two, three)] == [2, 4, 5]
    assert torch.equal(two[: len(one)], one) and torch.equal(three[: len(two)], two)
    for verb, added in VERBS:
        held = content(*sources)
        assert main(verb.split()) == 0, verb
        after = content(*sources)
        assert {file.name for file in after.keys() - held.keys()} <= set(added), verb
        assert {file: after.get(file) for file in held} == held, verb
    held = content(*sources)
    for run in sources[1:3]:
        with TestClient(create_app(opened_model(run), "run")) as client:
            assert client.get("/entities").status_code == 200
            for path, body in (("/predict", {"head": "e1", "relation": "r0"}),
                               ("/nearest", {"entity": "e1"})):  # fmt: skip
                assert client.post(path, json=body).status_code == 200
    assert content(*sources) == held
