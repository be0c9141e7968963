"""Write the page of the Python interface, and the front page of the docs site.

    python scripts/docs_site.py     # after a change of kge_torchrec.__all__

mkdocs calls ``on_page_markdown`` while it builds the site (mkdocs.yml, ``hooks``).
"""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "reference" / "api.md"

_API_START = """\
# Python interface

```python
import kge_torchrec

kge_torchrec.plan(
    devices="8xH100-80GB", entities=86_000_000, relations=14_824, triples=338_586_276
)["fits"]
```

These names are public; other modules may change. The import takes no time and changes nothing in
the process: torch is loaded at the first use. The site shows the docstrings below the table.

| name | |
|---|---|
"""


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return the README and the contents for docs/index.md, and other pages unchanged."""
    if page.file.src_uri != "index.md":
        return markdown
    readme = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text(encoding="utf-8"))
    return f"{readme}\n{re.sub('^#', '##', markdown, flags=re.MULTILINE)}"


def api_page() -> str:
    """Return the page: a table of all public names, then the marks for mkdocstrings."""
    import kge_torchrec

    public = {name: getattr(kge_torchrec, name) for name in kge_torchrec.__all__}
    groups: dict[str, list[str]] = {
        title: [] for title in ("Functions", "Classes", "Settings", "Errors")
    }
    for name, what in public.items():
        groups[_group(what)].append(name)
    page = _API_START
    for name in (name for names in groups.values() for name in names):
        page += f"| `{name}` | {_first_sentence(public[name])} |\n"
    for title, names in groups.items():
        page += f"\n## {title}\n" if names else ""
        page += "".join(f"\n::: {public[name].__module__}.{name}\n" for name in names)
    return page


def _group(what: Any) -> str:
    if not inspect.isclass(what):
        return "Functions"
    if issubclass(what, BaseException):
        return "Errors"
    return "Settings" if is_dataclass(what) else "Classes"


def _first_sentence(what: Any) -> str:
    paragraph = " ".join((inspect.getdoc(what) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0].replace("``", "`").replace("|", r"\|")


if __name__ == "__main__":
    API.write_text(api_page(), encoding="utf-8")
