"""The deliberate faults of ``make mutations``: that each can still be put in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_text_of_every_fault_occurs_once_in_its_file(monkeypatch):
    """``make mutations`` checks that tests notice each fault, which takes an hour."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from check_mutations import FAULTS

    texts = {f.file: (ROOT / "kge_torchrec" / f.file).read_text(encoding="utf-8") for f in FAULTS}
    assert [f.name for f in FAULTS if texts[f.file].count(f.right) != 1] == []
    files = [path for f in FAULTS for path in f.tests.partition(" -k ")[0].split()]
    assert [path for path in files if not (ROOT / path.partition("::")[0]).exists()] == []
    assert len(FAULTS) > 200
