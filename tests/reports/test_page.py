"""The page about runs: what it says, that it needs nothing else, and that labels are only text."""

from __future__ import annotations

import importlib
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from training_runs import config_of, random_triples

from kge_torchrec import api, report
from kge_torchrec.answers.queries import Prediction
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import prepare
from kge_torchrec.errors import KGEError
from kge_torchrec.reports.facts import (
    Example,
    ReportError,
    RunFacts,
    differences,
    entity_map,
    examples,
    names_of,
)
from kge_torchrec.reports.page import _cells

WILD = "<script>alert('&')</script> $x_1$ $\\frac$ \u202e"  # also formulas, from right to left


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    common = {"train__epochs": 4, "evaluation__every": 2, "train__batch_size": 256,
              "model__init": None}  # fmt: skip
    for name, dim in (("one", 16), ("two", 32)):
        api.train(config_of("countries", folder / name, model__dim=dim, **common)).close()
    return folder


class Tags(HTMLParser):
    """Names of the elements, and what they load."""

    def __init__(self, text: str):
        super().__init__()
        self.names, self.loaded = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        links = [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        self.loaded += [link for link in links if not link.startswith(("#", "data:"))]


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "kge_torchrec.reports.page")
    with pytest.raises(KGEError, match=r"report needs matplotlib: pip install -e '.\[report\]'"):
        importlib.import_module("kge_torchrec.reports.page")


def test_page_compares_two_runs(runs, capsys):
    page = runs / "page.html"
    assert main(["report", str(runs / "one"), str(runs / "two"), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.names.count("svg") == 4 and tags.loaded == [] and "script" not in tags.names
    for name in ("one", "two"):
        mrr = RunFacts.read(runs / name, name).results["test"]["both"]["realistic"]["mrr"]
        assert f"<td><bdi>{name}</bdi></td><td>both</td>" in re.sub(" class=number", "", text)
        assert f"{mrr:.4f}" in text
    assert "<td>model.dim</td><td><bdi>16</bdi></td><td><bdi>32</bdi></td>" in text
    assert "train.epochs" not in text  # the same in both
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles == ["Test, filtered and realistic, all entities ranked", "Curves", "Time",
                      "Settings that differ", "By relation", "Map of entities", "Examples",
                      "Layout of <bdi>one</bdi>", "Layout of <bdi>two</bdi>"]  # fmt: skip


def test_page_works_without_models_and_results(runs):
    folder = runs / "half"
    folder.mkdir()
    (folder / "config.yaml").write_bytes((runs / "one" / "config.yaml").read_bytes())
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.0}\n{"kin')
    text = report(folder, folder / "report.html", with_models=False).read_text(encoding="utf-8")
    assert "half: no test results yet." in text and "Curves" in text
    assert "Map of entities" not in text and "<td>model.dim</td><td><bdi>16</bdi></td>" in text


def test_damaged_results_file_is_named(runs, capsys):
    folder = runs / "damaged"
    folder.mkdir()
    (folder / "config.yaml").write_bytes((runs / "one" / "config.yaml").read_bytes())
    (folder / "results.json").write_text('{"test": ')
    (folder / "evaluation-test-by-relation.json").write_text("{")
    assert main(["report", str(folder), "--no-models"]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert f"{folder / 'results.json'} is damaged" in text
    for content in ('{"test": ', "[]", '{"test": 3}'):
        (folder / "results.json").write_text(content)
        with pytest.raises(ConfigError, match=r"results.json is damaged.*--resume .* writes it"):
            _ = api.open_run(folder).results


def test_charts_have_descriptions_and_page_colors(runs, tmp_path):
    text = report([runs / "one", runs / "two"], tmp_path / "page.html").read_text("utf-8")
    charts = re.findall("<svg(.*?)</svg>", text, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        assert re.match(' role="img" aria-label="[^"]{20,}"', chart)
        assert "#000000" not in chart and "#ffffff" not in chart and "currentColor" in chart
    assert "prefers-color-scheme: dark" in text


def test_labels_are_escaped(tmp_path):
    triples = [(f"{WILD}{h}", f"{WILD}r{r}", f"{WILD}{t}")
               for h, r, t in random_triples(20, 2, 60)]  # fmt: skip
    store = prepare({"train": triples, "test": triples[:5]}, tmp_path / "store")
    folder = tmp_path / "run <i>"
    api.train(config_of(store.path, folder, model__dim=8)).close()
    text = report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    assert not {"script", "i"} & {*Tags(text).names} and "&lt;script&gt;" in text
    assert "<title>run &lt;i&gt;</title>" in text
    for label in re.findall(r"&lt;script&gt;[^<]*", text.split("<h2>Examples</h2>")[1]):
        assert f"<bdi>{label}</bdi>" in text
    with api.open_run(folder) as run:
        run.evaluate(by=["relation"])  # draws labels as well


def test_examples_and_map_come_from_the_model(runs):
    with api.open_run(runs / "one") as run:
        rows = run.model.shard.rows.numpy()
        results = entity_map(run)
        assert examples(run) == examples(run) and len(examples(run)) == 6
        for example in examples(run):
            assert example.answers == run.predict(example.head, example.relation, k=5)
        order = run.model.store.entities.ids(results.labels)
    centred = rows[order] - rows[order].mean(0)
    values = np.linalg.eigvalsh(np.cov(centred.T))[::-1]
    assert results.explained == pytest.approx(values[:2].sum() / values.sum(), rel=1e-4)
    np.testing.assert_allclose(results.places.var(0, ddof=1), values[:2], rtol=1e-4)
    assert (np.diff(results.degrees) <= 0).all()


def test_right_and_known_answers_are_marked():
    answers = [Prediction(1, "a", 2.0, "train"), Prediction(2, "b", 1.0), Prediction(3, "c", 0.5)]
    *_, cell = _cells(Example("h", "r", "b", answers))
    assert cell == (
        '<bdi>a</bdi> <small>(known)</small>, <span class="right"><bdi>b</bdi></span>, <bdi>c</bdi>'
    )


def test_run_names_and_differences_are_listed(runs, tmp_path):
    assert names_of([tmp_path / "a" / "x", tmp_path / "b" / "x"]) == ["a/x", "b/x"]
    with pytest.raises(ReportError, match="named twice"):
        report([runs / "one", runs / "two" / ".." / "one"], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="is no run folder"):
        report(tmp_path, tmp_path / "page.html")
    facts = [RunFacts.read(runs / name, name) for name in ("one", "two")]
    assert differences(facts) == [("model.dim", [16, 32])]


def test_validation_seconds_are_logged(runs):
    lines = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    valid = [line["seconds"] for line in lines if line["kind"] == "valid"]
    assert len(valid) == 2 and all(0 < seconds < 60 for seconds in valid)
    facts = RunFacts.read(runs / "one", "one")
    assert facts.seconds()["validation"] == sum(valid) and facts.seconds()["training"] > 0
