"""Pages and model cards, made by Jinja2 from the files in ``templates/``."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from kge_torchrec.environment import installed


def render(template: str, **values: Any) -> str:
    """Return the text of a template.

    Args:
        template: A file in ``templates/``. In HTML every value is escaped that is no ``Markup``.
        values: What the template names; a missing value raises ``jinja2.UndefinedError``.
    """
    return _environment().get_template(template).render(**values)


def isolated(text: object) -> Markup:
    """Return text as an HTML element that keeps its own direction, such as a label in Arabic."""
    return Markup("<bdi>{}</bdi>").format(text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kge_torchrec"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"isolated": isolated, "zip": zip}
    environment.globals["version"] = installed(["kge-torchrec"]).get("kge-torchrec", "")
    return environment
