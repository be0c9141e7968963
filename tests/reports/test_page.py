"""The page about runs: what it says, that it needs nothing else, and that labels are only text."""

from __future__ import annotations

import importlib
import json
import random
import re
import shutil
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from training_runs import config_of, random_triples

from kge_torchrec import api, report
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import prepare
from kge_torchrec.errors import KGEError
from kge_torchrec.pages import COLORS
from kge_torchrec.reports import page as pages
from kge_torchrec.reports.folders import RunFacts, differences, names_of
from kge_torchrec.reports.page import example_rows, principal_axes, relation_metrics, types_of
from kge_torchrec.training.run_folder import RunFolder

WILD = "<script>alert('&')</script> $x_1$ $\\frac$ \u202e"  # also formulas, from right to left


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


def contents(folder):
    """Every file below a folder, with its bytes and its time."""
    return {x: (x.read_bytes(), x.stat().st_mtime_ns) for x in folder.rglob("*") if x.is_file()}


def by_relation(text):
    """The relations of the page with their number of answers and their metric in each run."""
    row = r"<tr><td><bdi>([^<]*)</bdi></td><td class=number>([\d,]+)</td>\s(.*?)</tr>"
    found = {}
    for name, answers, cells in re.findall(row, text, re.DOTALL):
        values = [float(x) for x in re.findall(r">([\d.]+)</span>", cells)]
        found[name] = int(answers.replace(",", "")), values
    return found


def test_page_compares_two_runs_and_writes_nothing_else(runs, capsys, tmp_path):
    page, before = tmp_path / "page.html", contents(runs)
    assert main(["report", str(runs / "one"), str(runs / "two"), "-o", str(page)]) == 0
    assert contents(runs) == before
    text = page.read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.names.count("svg") == 3 and tags.loaded == [] and "script" not in tags.names
    for name in ("one", "two"):
        mrr = RunFacts.read(runs / name, name).test["both"]["realistic"]["mrr"]
        assert f"<td><bdi>{name}</bdi></td><td>both</td><td class=number>{mrr:.4f}</td>" in text
    assert "<td>model.dim</td><td><bdi>8</bdi></td><td><bdi>32</bdi></td>" in text
    assert "train.epochs" not in text  # the same in both
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles == ["Test", "Training", "Settings that differ", "By relation",
                      "Map of entities", "Examples", "Layout of <bdi>one</bdi>",
                      "Layout of <bdi>two</bdi>"]  # fmt: skip
    assert "filtered ranks among all entities" in text


def test_page_after_a_resume_is_of_the_new_checkpoint(runs, tmp_path):
    folder = shutil.copytree(runs / "one", tmp_path / "run")
    old = by_relation(report(folder).read_text("utf-8"))
    api.resume(folder, {"train.epochs": 8}).close()
    text = report(folder).read_text("utf-8")
    new = by_relation(text)
    mrr = RunFacts.read(folder, "run").test["both"]["realistic"]["mrr"]
    answers = sum(n for n, _ in new.values())
    assert sum(n * x for n, (x,) in new.values()) / answers == pytest.approx(mrr, abs=2e-4)
    assert new != old and "<td>done</td><td class=number>8</td>" in text


def test_a_run_selected_by_recall_is_shown_by_recall(tmp_path, runs):
    text = report([runs / "lists", runs / "one"], tmp_path / "page.html").read_text("utf-8")
    facts = RunFacts.read(runs / "lists", "lists")
    recall, (epochs, values) = facts.test["recommendation"]["recall@20"], facts.validations()
    assert epochs == [1, 2] and facts.best == max(values) > 0
    charts = re.findall('aria-label="([^"]*)"', text)
    assert charts[:3] == ["training loss by step of lists, one", "recall@20 of valid by epoch of "
                          "lists", "mrr of valid by epoch of one"]  # fmt: skip
    assert f"recall@20 {recall:.4f}" in text and f"recall@20 {facts.best:.4f}" in text
    assert "recall@20 of <bdi>lists</bdi>" in text and "mrr of <bdi>one</bdi>" in text
    with api.open_run(runs / "lists") as run:
        grouped = run.evaluate(recommend=[20], by=["relation"])["by"]["relation"]["groups"]
        found = relation_metrics(run, "recall@20")
    assert found == {x["group"]: (x["recommendation"]["recall@20"], x["recommendation"]["answers"])
                     for x in grouped if x["recommendation"]["answers"]}  # fmt: skip


def typed_graph(folder):
    """Users who visit places, and whose names begin with their type."""
    draw = random.Random(0)
    lines = sorted({f"user:{draw.randrange(20)}\tvisits\tplace:{draw.randrange(15)}"
                    for _ in range(120)})  # fmt: skip
    draw.shuffle(lines)
    folder.mkdir()
    for split, part in (("valid", lines[:20]), ("test", lines[20:40]), ("train", lines[40:])):
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in part))
    return folder


def test_types_are_colors_of_the_map(tmp_path, monkeypatch):
    graph = typed_graph(tmp_path / "graph")
    api.train(config_of(graph, tmp_path / "run", data__types="prefix")).close()
    text = report(tmp_path / "run").read_text("utf-8").split("Map of entities")[1]
    assert all(f">{kind}</text>" in text for kind in ("user", "place"))
    assert COLORS[0].lower() in text.lower() and COLORS[1].lower() in text.lower()
    assert "training triples" not in text
    with api.open_run(tmp_path / "run") as run:
        ids = np.arange(run.model.num_entities)
        labels = run.entity_labels.labels(ids)
        assert types_of(run, ids) == [label.partition(":")[0] for label in labels]
        monkeypatch.setattr(pages, "MAX_TYPES", 1)
        assert set(types_of(run, ids)) == {"user", "other types"}  # 20 users, 15 places


def test_a_run_that_still_trains_has_a_page(unfinished):
    folder = unfinished("run")
    with RunFolder(folder).locked():
        text = report(folder).read_text("utf-8")
    assert "run: no test results yet; training, 2 of 2 epochs." in text
    assert "<td>training</td>" in text and "mrr of valid" in text and by_relation(text)


def test_exports_and_folders_of_seeds_are_refused(runs, capsys):
    for folder in (runs / "export", runs / "seeds"):
        assert main(["report", str(folder)]) == 1
        said = capsys.readouterr().err
        assert "name" in said and "show" in said and str(folder) in said
        assert not (folder / "report.html").exists()


@pytest.fixture
def begun(runs, tmp_path):
    """A run that has only begun."""
    (tmp_path / "config.yaml").write_bytes((runs / "one" / "config.yaml").read_bytes())
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.0}\n{"kin')
    return tmp_path


def test_page_works_without_models_and_results(begun):
    text = report(begun, begun / "report.html", with_models=False).read_text(encoding="utf-8")
    assert f"{begun.name}: no test results yet; failed, 0 of 2 epochs." in text and "<svg" in text
    assert "Map of entities" not in text and "<td>model.dim</td><td><bdi>8</bdi></td>" in text


def test_damaged_results_file_is_named(begun):
    (begun / "results.json").write_text('{"test": ')
    assert main(["report", str(begun), "--no-models"]) == 0
    text = (begun / "report.html").read_text(encoding="utf-8")
    assert f"{begun / 'results.json'} is damaged" in text
    for content in ('{"test": ', "[]", '{"test": 3}'):
        (begun / "results.json").write_text(content)
        with pytest.raises(ConfigError, match=r"results.json is damaged.*--resume .* writes it"):
            _ = api.open_run(begun).results


def test_page_is_readable_on_a_phone_and_in_the_dark(runs, tmp_path):
    text = report([runs / "one", runs / "two"], tmp_path / "page.html").read_text("utf-8")
    assert '<meta name="viewport" content="width=device-width' in text
    # Tables scroll by themselves, and charts are no wider than a phone.
    assert text.count("<table>") == text.count('<div class="scroll"><table>') > 3
    assert int(re.search(r"svg \{[^}]*min-width: (\d+)px", text)[1]) <= 320
    dark = text.partition("prefers-color-scheme: dark")[2].partition("\n}")[0]
    colors = set(re.findall(r"var\((--[a-z]+)\)", text)) - {"--share"}
    assert all(f"{color}: #" in dark for color in colors)
    charts = re.findall("<svg(.*?)</svg>", text, re.DOTALL)
    assert len(charts) == 3
    for chart in charts:
        assert re.match(' role="img" aria-label="[^"]{20,}"', chart)
        assert "#000000" not in chart and "#ffffff" not in chart and "currentColor" in chart


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


def test_examples_and_map_come_from_the_model(runs):
    with api.open_run(runs / "one") as run:
        rows = run.model.shard.rows
        examples = example_rows(run)
        assert examples == example_rows(run) and len(examples) == 6
        for head, relation, tail, cell in examples:
            labels = [re.sub("<[^>]*>", "", x) for x in (head, relation, tail)]
            answers = run.predict(labels[0], labels[1], k=5)
            assert re.findall("<bdi>([^<]*)</bdi>", cell) == [x.label for x in answers]
            right = [f"<bdi>{x.label}</bdi></span>" in cell for x in answers]
            assert right == [x.label == labels[2] for x in answers]
            known = sum(x.known is not None for x in answers if x.label != labels[2])
            assert cell.count("(known)") == known
    places, explained = principal_axes(rows)
    values = np.linalg.eigvalsh(np.cov(rows.numpy().T))[::-1]
    assert explained == pytest.approx(values[:2].sum() / values.sum(), rel=1e-4)
    np.testing.assert_allclose(places.var(0, ddof=1), values[:2], rtol=1e-4)


def test_run_names_and_differences_are_listed(runs, tmp_path):
    assert names_of([tmp_path / "a" / "x", tmp_path / "b" / "x"]) == ["a/x", "b/x"]
    with pytest.raises(ConfigError, match="named twice"):
        report([runs / "one", runs / "two" / ".." / "one"], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="is no run folder"):
        report(tmp_path, tmp_path / "page.html")
    one, two = (RunFacts.read(runs / name, name) for name in ("one", "two"))
    assert differences([one.settings, two.settings]) == ["model.dim"]
    lines = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    valid = [line["seconds"] for line in lines if line["kind"] == "valid"]
    assert len(valid) == 2 and all(0 < seconds < 60 for seconds in valid)
    assert one.seconds("valid") == sum(valid) and one.seconds("epoch") > 0
