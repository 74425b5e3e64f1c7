"""The help page of a command: what it does, then its options, no word of it broken at any width of a terminal."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

WIDEST = 100  # columns of text that are easy to read
INDENT = 28  # where the words about an option begin
_NO_BREAK = "\N{NO-BREAK SPACE}"


class PageCommand(TyperCommand):
    """A command whose page is made from its function's signature."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; the width is the terminal's."""
        assert self.callback is not None
        function = inspect.unwrap(self.callback)
        formatter.write(command_page(ctx.command_path, function, _columns()))


class PageGroup(TyperGroup):
    """The command line itself: its commands, with the first sentence of each."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; the width is the terminal's."""
        width = _columns()
        parts = [f"Usage: {ctx.command_path} COMMAND ...", _wrapped(self.help or "", width, "  "), "Commands:"]
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            told = inspect.cleandoc(getattr(command, "help", None) or "").split("\n\n")[0]
            parts.append(_entry(name, " ".join(told.split()), width))
        parts.append(f"What a command takes: {ctx.command_path} COMMAND --help")
        formatter.write("\n\n".join([*parts[:2], "\n".join(parts[2:-1]), parts[-1]]) + "\n")


def command_page(path: str, function: Callable[..., Any], width: int) -> str:
    """The page of a command.

    Args:
        path: how it is called, such as "vllm-medusa bench".
        function: its function, with options annotated as typer wants them.
        width: columns of the terminal.
    """
    arguments, options = [], []
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind, info = _split(hints[parameter.name])
        needed = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            name = info.metavar or parameter.name.upper()
            arguments.append((name if needed else f"[{name}]", _about(info, parameter.name, kind, parameter.default)))
        else:
            head = _head(info, parameter.name, kind)
            options.append(
                (head, ("Required. " if needed else "") + _about(info, parameter.name, kind, parameter.default))
            )
    options.append(("--help", "Show this page."))
    usage = " ".join(["Usage:", path, *(name for name, _ in arguments), "[OPTIONS]"])
    parts = [usage, *_paragraphs(inspect.getdoc(function) or "", width)]
    for title, entries in (("Arguments:", arguments), ("Options:", options)):
        if entries:
            parts.append("\n".join([title, *(_entry(head, told, width) for head, told in entries)]))
    return "\n\n".join(parts) + "\n"


def _split(hint: Any) -> tuple[Any, Any]:
    """(type, typer's info) of an annotated parameter; of `X | None` it is X, of a list what it holds."""
    kind, info = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, OptionInfo())
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    return kind, info


def _head(info: Any, name: str, kind: Any) -> str:
    declared = _declared(info, name)
    if kind is bool:
        return declared.replace("/", " / ")
    return f"{declared} {info.metavar or _metavar(kind)}"


def _declared(info: Any, name: str) -> str:
    """What is typed: "--json", or "--plain/--other"; in an annotation typer takes the first one for a default."""
    given = [info.default] if isinstance(info.default, str) and info.default.startswith("-") else []
    return str([*given, *(info.param_decls or ()), f"--{name.replace('_', '-')}"][0])


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _about(info: Any, name: str, kind: Any, default: Any) -> str:
    """What is said about a value, the range it may have, and what it is if it is not given."""
    parts = [info.help or ""]
    if info.min is not None or info.max is not None:
        low, high = (None if bound is None else f"{bound:g}" for bound in (info.min, info.max))
        parts.append(
            f"[{low} or more]" if high is None else f"[at most {high}]" if low is None else f"[{low} to {high}]"
        )
    if default not in (None, inspect.Parameter.empty) and kind is not bool:
        parts.append(f"[default: {default}]")
    elif kind is bool and default:
        parts.append(f"[default: {_declared(info, name).split('/')[0]}]")
    return " ".join(filter(None, parts))


def _entry(head: str, told: str, width: int) -> str:
    """An option beside what is said about it, or above where it is long or the terminal narrow."""
    indent = INDENT if width >= 60 else 6
    whole = re.sub(r"\[[^\]]*\]", lambda found: found[0].replace(" ", _NO_BREAK), told)  # a range, a default
    lines = textwrap.wrap(whole, min(width, WIDEST) - indent, break_long_words=False, break_on_hyphens=False)
    lines = [line.replace(_NO_BREAK, " ") for line in lines]
    beside = len(head) + 4 <= indent
    first = f"  {head:<{indent - 2}}{lines[0]}" if beside and lines else f"  {head}"
    return "\n".join([first, *(" " * indent + line for line in (lines[1:] if beside else lines))])


def _paragraphs(text: str, width: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield _wrapped(paragraph, width, "  ")


def _wrapped(text: str, width: int, indent: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), min(width, WIDEST), initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _columns() -> int:
    return shutil.get_terminal_size((80, 24)).columns
