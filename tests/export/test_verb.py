"""The command line's export."""

from __future__ import annotations

import numpy as np
import pytest

from kge_torchrec import load_model
from kge_torchrec.cli import main
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.trained_model import ALONE
from kge_torchrec.training.checkpoints import Checkpoints


def refused(capsys, arguments, *expected):
    """Exit code 1 and one message on stderr."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 1 and out == ""
    assert err.startswith("kge-torchrec: ") and err.count("\n") == 1
    for words in expected:
        assert words in err


def test_export_verb_writes_the_folder(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run.path), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(str(file) in printed for file in out.iterdir())
    assert np.array_equal(load_model(out).entities, run.table)


def test_export_verb_takes_checkpoint_and_overwrite(run, tmp_path, capsys):
    out, name = tmp_path / "out", Checkpoints(run.folder.checkpoints, ALONE).names()[0]
    command = ["export", str(run.path), "-o", str(out)]
    assert main(command) == 0
    assert main([*command, "--checkpoint", name, "--overwrite"]) == 0
    assert load_model(out).description["checkpoint"]["name"] == name


def test_what_is_refused(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    command = ["export", run.path, "-o", out]
    refused(capsys, ["export", tmp_path, "-o", out], "is no run folder")
    refused(capsys, ["export", tmp_path / "no", "-o", out], "is no run folder")
    refused(capsys, [*command, "--checkpoint", "step-7"], "no checkpoint 'step-7'; it has step-")
    refused(capsys, ["export", run.path, "-o", tmp_path], "exists already", "--overwrite")
    refused(capsys, ["export", run.path, "-o", run.path, "--overwrite"], "is not overwritten")
    (tmp_path / "file").write_text("")
    refused(capsys, ["export", run.path, "-o", tmp_path / "file" / "out"], "could not be written")
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(run.path), "-o", str(out), "--format", "csv"])
    capsys.readouterr()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ExportFolder, "append", fail)
    refused(capsys, command, "No space left on device", "free on that disk")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_untrained_run_is_rejected(run, tmp_path, capsys):
    (tmp_path / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    refused(capsys, ["export", tmp_path, "-o", tmp_path / "out"], "has no checkpoint yet")
