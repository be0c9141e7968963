"""Variants by name, and what is refused before anything starts."""

from __future__ import annotations

from functools import partial

import pytest
from training_runs import config_of

from kge_torchrec.cli import run_verb
from kge_torchrec.commands.compare import VARIANTS, variants
from kge_torchrec.comparison.compare import Extent
from kge_torchrec.config import Config, ConfigError, TrainConfig
from kge_torchrec.errors import DataError


def test_contenders_differ_only_in_engine_and_preset():
    config = config_of("countries", train__optimizer="adam", entities__engine="handrolled")
    results = variants(config, list(VARIANTS))
    assert list(results) == list(VARIANTS)
    for name, (engine, preset) in VARIANTS.items():
        assert (results[name].entities.engine, results[name].entities.preset) == (engine, preset)
        values, base = results[name].to_dict(), config.to_dict()
        assert {**values, "entities": 0} == {**base, "entities": 0}


REFUSED = {
    "an unknown name": (["--engines", "torchrec", "dglke"], "--engines: 'dglke' is none of torch"),
    "a name twice": (["--engines", "dgl", "dgl"], "--engines names dgl twice"),
    "a single name": (["--engines", "torchrec"], "--engines needs at least two"),
    "dicee has adam only": (
        ["--engines", "torchrec", "dicee", "--train.optimizer", "adagrad"],
        "dicee: entities.preset: dicee has adam only, not adagrad",
    ),
    "presets without weight decay": (
        ["--engines", "handrolled", "dgl", "--train.optimizer", "adam",
         "--train.optimizer_options.weight_decay", "0.1"],
        "dgl: train.optimizer_options.weight_decay",
    ),
    "variants share a folder": (
        ["--entities.placement", "disk"],
        "overwrite each other's parts; set entities.placement to memory",
    ),
    "TorchRec's pipeline": (
        ["--engines", "torchrec", "handrolled", "--train.pipeline", "sparse_dist"],
        "train.pipeline sparse_dist",
    ),
    "an engine besides the names": (["--entities.engine", "dgl"], "entities.engine: --engines"),
    "a preset besides the names": (["--entities.preset=dgl"], "entities.preset: --engines"),
    "a schedule that needs validation": (["--train.schedule", "plateau"], "train.schedule plateau"),
    "an unknown key": (["--train.learning_rate", "1"], "unknown key train.learning_rate"),
    "no ranks": (["--world-sizes", "0", "1"], "--world-sizes must be different integers >= 1"),
    "a world size twice": (["--world-sizes", "2", "2"], "--world-sizes must be different"),
    "negative repeats": (["--repeats", "-1"], "--repeats must be an integer >= 0"),
    "no steps": (["--steps", "0"], "--steps must be an integer >= 1"),
}  # fmt: skip
run = partial(run_verb, "compare")


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_contenders_are_rejected(name, tmp_path):
    arguments, words = REFUSED[name]
    folder = tmp_path / "compared"
    with pytest.raises(ConfigError) as caught:
        run(["demo", *arguments, "--run.dir", str(folder)])
    assert words in str(caught.value)
    assert not folder.exists()


def test_nonempty_folder_is_rejected(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"run.dir: .* is not empty"):
        run(["demo", "--run.dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_bad_data_leaves_no_folder(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        run(["demo", "--run.dir", str(tmp_path / "run"), "--data.path", str(tmp_path / "nowhere")])
    assert list(tmp_path.iterdir()) == []


def test_torchrun_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="without torchrun"):
        run(["demo"])


def test_help(capsys):
    with pytest.raises(SystemExit):
        run(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("--world-sizes", "--repeats", "--steps", *VARIANTS))
    assert run([]) == 2


def test_extents_and_schedules_come_from_the_config():
    assert Extent().world_sizes == (1,)
    assert set(variants(Config(train=TrainConfig(schedule="cosine")), ["torchrec", "dgl"]))
