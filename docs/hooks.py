"""Fill the tables of the pages from the code when the site is built, so that they cannot go stale.

A page holds a marker, `<!-- table: methods -->`, and gets the table in its place.
"""

from __future__ import annotations

import json
import re
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from acclimate.methods import all_methods
from acclimate.recipe import Recipe

MARKER = re.compile(r"<!-- table: (\w+) -->")


def on_page_markdown(markdown: str, **context: Any) -> str:
    """MkDocs calls this with the text of every page."""
    return MARKER.sub(lambda found: TABLES[found.group(1)](), markdown)


def methods_table() -> str:
    """A table a stage, the ready methods first."""
    rows = sorted(all_methods(), key=lambda method: method.status != "ready")
    parts = []
    for stage in dict.fromkeys(method.stage for method in all_methods()):
        parts.append(f"## {stage.capitalize()}\n")
        parts.append(_table(("method", "what it does", "select it with", "status", "paper"), [
            (f"`{row.name}`", row.job, f"`{row.option}`" if row.option else "", row.status, row.paper)
            for row in rows if row.stage == stage
        ]))  # fmt: skip
    return "\n".join(parts)


def recipe_table() -> str:
    """Every key of a recipe, the groups' keys dotted."""
    return _table(("key", "type", "default", "what it is"), list(_keys(Recipe, "")))


def _keys(model: type[BaseModel], prefix: str) -> typing.Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{name}.")
            continue
        default = "" if field.default is PydanticUndefined else f"`{_plain(field.default)}`"
        limits = ", ".join(_limit(item) for item in field.metadata)
        yield (
            f"`{prefix}{name}`",
            _type(field.annotation) + (f", {limits}" if limits else ""),
            default,
            field.description or "",
        )


def _type(annotation: Any) -> str:
    """`str | None` as "text or null", in YAML's words."""
    if annotation is type(None):
        return "null"
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in inner)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _limit(item: Any) -> str:
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return " ".join(f"{words} {getattr(item, name)}" for name, words in signs.items() if hasattr(item, name))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


TABLES = {"methods": methods_table, "recipe": recipe_table}
