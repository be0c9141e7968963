"""Files and folders are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kge_torchrec import files


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "content").write_text(content)
    return path


def test_folder_replaces_another_completely(tmp_path):
    made, target = folder(tmp_path / ".made", "new"), folder(tmp_path / "it", "before")
    folder(tmp_path / ".made.old", "of a program that was killed")
    files.put_in_place(made, target)
    assert (target / "content").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_lock_ends_with_its_file(tmp_path):
    with (tmp_path / "lock").open("a") as file, (tmp_path / "lock").open("a") as other:
        assert files.lock(file) and not files.lock(other)
        file.close()
        assert files.lock(other)


def test_failed_rename_restores_the_old_folder(tmp_path, monkeypatch):
    made, target = folder(tmp_path / ".made", "new"), folder(tmp_path / "it", "before")
    rename = Path.rename

    def refuse(path: Path, to: Path) -> Path:
        if path == made:
            raise OSError(28, "No space left on device")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        files.put_in_place(made, target)
    assert (target / "content").read_text() == "before"


def test_target_of_a_symbolic_link_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "results.json"
    link.symlink_to(tmp_path / "elsewhere" / "there.json")
    for text in ("first", "second"):
        files.write_text(link, text)
        assert link.is_symlink() and link.read_text() == text
    assert [path.name for path in tmp_path.joinpath("elsewhere").iterdir()] == ["there.json"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    files.write_json(file, {"mrr": 0.5})

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", refuse)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(file, {"mrr": 0.6})
    assert file.read_text() == '{\n "mrr": 0.5\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_two_writers_of_a_file_do_not_mix(tmp_path):
    file = tmp_path / "answers.tsv"
    with files.replacing(file) as first:
        first.write_text("1")
        with files.replacing(file) as second:
            second.write_text("2")
        assert file.read_text() == "2" and first.read_text() == "1"
    assert file.read_text() == "1" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name, said", [
    ("gone/it", "gone: no such file or folder"),
    ("file/it", "file: this is, or lies in, a file, and a folder is needed"),
    ("folder", "folder: this is a folder, and a file is needed"),
])  # fmt: skip
def test_invalid_paths_are_reported(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    for write in (files.check_place, lambda path: files.write_text(path, "")):
        with pytest.raises(OSError) as error:
            write(Path(name))
        assert files.in_words(error.value) == said
    assert files.in_words(OSError(28, "No space left on device")) == "no space is left on the disk"
    assert files.in_words(OSError("a pipe")) == "a pipe"


def test_root_folder_is_rejected():
    with pytest.raises(IsADirectoryError, match="the root folder; name a file in it"):
        files.partial_of(Path("/"))
