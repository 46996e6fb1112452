"""Options of a command, made from the fields of its settings, so that no flag is written down twice."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Command = TypeVar("Command", bound=Callable[..., Any])


def options_of(settings: type[BaseModel]) -> Callable[[Command], Command]:
    """Add one option per field. Values arrive as text, or as None where none was given.

    They are checked by `settings` itself, together with a recipe's, so both give the same messages.
    """

    def add(command: Command) -> Command:
        for name, field in reversed(settings.model_fields.items()):
            command = _option(name, field)(command)
        return command

    return add


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    flag = f"--{name.replace('_', '-')}"
    if field.annotation in (bool, bool | None):  # None where neither was given, so that a recipe's word stands
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=field.description)
    if field.annotation == tuple[str, ...]:
        return click.option(flag, name, metavar="TEXT", multiple=True, help=field.description)
    if (
        isinstance(more := field.json_schema_extra, dict) and "alone" in more
    ):  # an option that may stand without a value
        return click.option(
            flag, name, metavar=str(more["metavar"]), is_flag=False, flag_value=more["alone"], help=_help(field)
        )
    return click.option(flag, name, metavar=_metavar(field), help=_help(field))


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, for the settings' own check."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def _help(field: FieldInfo) -> str:
    if field.is_required() or field.default_factory or field.default in (None, "", ()):
        return f"{field.description}"
    usual = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{field.description}  [{usual}]"


def _metavar(field: FieldInfo) -> str:
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return "|".join(kinds)
    if any(get_origin(kind) is tuple for kind in kinds):
        return "C,H,W"
    if get_origin(field.annotation) is dict:
        return "NAME=VALUE,..."
    return {int: "N", float: "X", Path: "PATH"}.get(kinds[0], "TEXT")
