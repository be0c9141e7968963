"""Write the generated parts of the docs site, and its front page.

mkdocs calls ``on_page_markdown`` while it builds the site (mkdocs.yml, ``hooks``). A line such as
``<!-- generated: keys -->`` of a page stands for a part.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return a page with its generated parts; docs/index.md has the README before the contents."""
    if page.file.src_uri == "index.md":
        readme = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text(encoding="utf-8"))
        return f"{readme}\n{re.sub('^#', '##', markdown, flags=re.MULTILINE)}"
    return re.sub(r"^<!-- generated: (\w+) -->$", generated, markdown, flags=re.MULTILINE)


def generated(mark: re.Match[str]) -> str:
    """Return the part that a mark names."""
    from kge_torchrec.config.describe import keys_tables

    return {"keys": keys_tables, "names": public_names, "verbs": verbs_table}[mark[1]]()


def verbs_table() -> str:
    """Return a table of all verbs."""
    from kge_torchrec.cli import VERBS

    rows = (f"| `{name}` | {verb.does} |\n" for name, verb in VERBS.items())
    return "| verb | task |\n|---|---|\n" + "".join(rows)


def public_names() -> str:
    """Return a table of all public names, then the marks for mkdocstrings."""
    import kge_torchrec

    public = {name: getattr(kge_torchrec, name) for name in kge_torchrec.__all__}
    groups: dict[str, list[str]] = {
        title: [] for title in ("Functions", "Classes", "Settings", "Errors")
    }
    for name, what in public.items():
        groups[_group(what)].append(name)
    part = "| name | |\n|---|---|\n"
    for name in (name for names in groups.values() for name in names):
        part += f"| `{name}` | {_first_sentence(public[name])} |\n"
    for title, names in groups.items():
        part += f"\n## {title}\n" if names else ""
        part += "".join(f"\n::: {public[name].__module__}.{name}\n" for name in names)
    return part


def _group(what: Any) -> str:
    if not inspect.isclass(what):
        return "Functions"
    if issubclass(what, BaseException):
        return "Errors"
    return "Settings" if is_dataclass(what) else "Classes"


def _first_sentence(what: Any) -> str:
    paragraph = " ".join((inspect.getdoc(what) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0].replace("``", "`").replace("|", r"\|")
