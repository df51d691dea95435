"""Command-line options: options shared by several commands, one option for every setting, and their help."""

import functools
import inspect
import re
import resource
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from lamina.config.engine_config import EngineConfig
from lamina.config.server_config import ServerConfig
from lamina.config.settings import Group, Setting, read_settings, settings
from lamina.core.errors import ConfigError, RequestError
from lamina.core.sampling import SamplingParams
from lamina.core.types import Pipelining

COMMON = "Common options"
PANELS = ("Arguments", "Options", COMMON, *get_args(Group))
"""The panels in the order of the help. Options without a panel are in "Options"."""

_OF_SETTINGS = (COMMON, *get_args(Group))
"""Panels whose options show the first sentences of their help; docs/settings.md has all of it."""

WIDEST_NAME = 28
"""Columns for the names of options. The help of an option with a longer name begins on the next line."""

_MARGINS = 4  # click's: two columns before the name, two before the help

MaxTokens = Annotated[int, typer.Option(help="Maximum tokens per completion.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: the model's, or 0.7.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the smallest set of tokens with at least this total probability. Default: the model's, or 1."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Sampling seed. Default: random.")]

Lanes = Annotated[str | None, typer.Option(help="Batches in flight: a number, or auto (the default).")]
PipeliningName = Annotated[Pipelining, typer.Option("--pipelining", help="How lanes take turns on compute workers.")]

WeightDTypeName = Annotated[
    Literal["auto", "fp8", "int8", "int4"],
    typer.Option("--weight-dtype", help="Element type of the layers' weights; auto is the model's own."),
]

TEMPERATURE = 0.7
"""Sampling temperature where neither the command nor the model gives one."""

MIN_OPEN_FILES = 64
"""Open-file limit needed to start one compute and one memory worker."""

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of these options, by name; options given here override it.",
        rich_help_panel=COMMON,
    ),
]


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for every setting of ``EngineConfig`` to ``command``, which gets the config as first argument."""
    return options_of(EngineConfig)(command)


def options_of(*configs: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for every setting of ``configs``, dataclasses, to a command, which gets them as first arguments.

    A parameter of the command replaces the option of the same name. The limit of open files is checked first.

    The decorated command raises ConfigError for invalid settings, also in the file that ``--config`` names.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(command).parameters.values())[len(configs) :]
        own = {parameter.name: parameter for parameter in parameters}
        names = [{setting.name for setting in settings(config)} for config in configs]
        known = {one.name: one for config in configs for one in settings(config) if one.name not in own}
        context = next((name for name, one in own.items() if one.annotation is typer.Context), None)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            _require_files()
            invocation: typer.Context = values["context" if context is None else context]
            chosen, others = _read_file(values["config_file"], configs, invocation, own)
            for name, setting in known.items():
                if _is_given(invocation, name):
                    chosen[name] = setting.parse(values[name])
            others = {name: value for name, value in others.items() if not _is_given(invocation, name)}
            made = [
                config(**{name: chosen[name] for name in chosen.keys() & of})
                for config, of in zip(configs, names, strict=True)
            ]
            command(*made, **{name: values[name] for name in own} | others)

        added = [_parameter("config_file", None, ConfigFile)]
        if context is None:
            added.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
        added += [_parameter(setting.name, setting.default, _option(setting)) for setting in known.values()]
        run.__signature__ = inspect.Signature([*own.values(), *added])  # type: ignore[attr-defined]
        return run

    return decorate


def _is_given(invocation: typer.Context, name: str) -> bool:
    source = invocation.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _read_file(
    file: Path | None, configs: Collection[type[Any]], invocation: typer.Context, own: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings in a ``--config`` file, and values of the command's ``own`` options. Raises ConfigError."""
    if file is None:
        return {}, {}
    known = {setting.name for config in configs for setting in settings(config)}
    options = {
        one.name: one for one in invocation.command.params if one.name in own and one.param_type_name == "option"
    }
    elsewhere = {setting.name: "lamina launch" for setting in settings(ServerConfig)}
    values = read_settings(file, *configs, others=options.keys() - known, elsewhere=elsewhere)
    others = {}
    for name in values.keys() - known:
        try:
            others[name] = options[name].process_value(invocation, str(values[name]))
        except typer.BadParameter as error:
            raise ConfigError(f"{file}: {name} is {values[name]!r}: {error.format_message()}") from None
    return {name: value for name, value in values.items() if name in known}, others


def _parameter(name: str, default: object, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(setting: Setting) -> Any:
    option = functools.partial(
        typer.Option,
        help=setting.meaning.help,
        rich_help_panel=COMMON if setting.meaning.common else setting.meaning.group,
    )
    if setting.choices:
        return Annotated[cast(Any, Literal)[setting.choices], option()]
    if bool in setting.kinds:
        return Annotated[bool, option()]
    if int in setting.kinds:
        metavar = "<int|auto>" if setting.optional else "<int>"
        return Annotated[int | None, option(metavar=metavar, parser=functools.partial(_number, int))]
    if float in setting.kinds:
        return Annotated[float | None, option(metavar="<number>", parser=functools.partial(_number, float))]
    return Annotated[str | None, option()]


def _number(kind: type[int | float], text: str) -> int | float | str:
    """Return a number; return other text unchanged, which the setting's check then reports."""
    try:
        return kind(text)
    except ValueError:
        return text


def _require_files() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        raise ConfigError(
            f"the limit of open files is {files}; two workers need {MIN_OPEN_FILES}. Raise it and run the command "
            "again: ulimit -n 1024"
        )


def check_model(config: EngineConfig) -> None:
    """Check the path of the model before anything slow is imported. Raises ModelError."""
    from lamina.models.directory import find

    find(config.model, weights=False, tokenizer=False)


def parse_lanes(text: str | None) -> int | None:
    """Return the number of lanes that an option names; None for "auto". Raises ConfigError."""
    if text is None or text == "auto":
        return None
    if not text.isdigit():
        raise ConfigError(f"lanes is {text!r}; give auto or a number")
    return int(text)


def check_sampling(**values: float | None) -> None:
    """Check the given parameters of ``SamplingParams``; None stands for a default. Raises RequestError."""
    try:
        SamplingParams(**{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]
    except ValueError as error:
        raise RequestError(str(error)) from error


def sampling_params(
    config: EngineConfig, max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None
) -> SamplingParams:
    """Return the parameters of the options above, else the model's defaults, with a fresh seed where none is given.

    Finds the model before anything slow is imported, and notes its defaults.

    Raises:
        ModelError: there is no such model, or its defaults are invalid.
        RequestError: a value is out of range.
    """
    from lamina.cli.console import notes
    from lamina.models.directory import describe_defaults, find, sampling_defaults

    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    given = {name: value for name, value in options.items() if value is not None}
    check_sampling(**given)
    defaults = sampling_defaults(find(config.model, weights=False, tokenizer=False), config.generation_config)
    if used := {name: value for name, value in defaults.items() if name not in given}:
        notes().print(f"Sampling as in generation_config.json: {describe_defaults(used)}.", soft_wrap=True)
    seed = secrets.randbits(31) if seed in (None, -1) else seed
    chosen: dict[str, Any] = {"max_tokens": None, "temperature": TEMPERATURE, **defaults, **given}
    return SamplingParams(**chosen, seed=seed)


class PanelledCommand(TyperCommand):
    """A command whose help shows its options by panel, as plain text.

    Typer's own panels are tables, which cut long names off at 80 columns and need a line for every three words.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)


class PanelledGroup(TyperGroup):
    """A command with subcommands whose help shows its options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _write_panels(command: TyperCommand | TyperGroup, context: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str, str]]] = {}  # name, help, and what click adds to the help: the default
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if record is None:
            continue
        name, text = record
        if getattr(option, "secondary_opts", None):
            name = f"--[no-]{option.opts[0].removeprefix('--')}"
        kind = "Arguments" if option.param_type_name == "argument" else "Options"
        panel = getattr(option, "rich_help_panel", None) or kind
        help = getattr(option, "help", None) or ""
        added = text.removeprefix(help)
        if panel in get_args(Group):  # the documentation has types and defaults
            name, added = name.split(" <")[0], ""
        panels.setdefault(panel, []).append((name, help, added))
    for panel in sorted(panels, key=PANELS.index):
        rows = panels[panel]
        columns = formatter.width - min(max(len(name) for name, *_ in rows), WIDEST_NAME) - _MARGINS
        with formatter.section(panel):
            formatter.write_dl(
                [
                    (name, (_sentences(help, columns - len(added)) if panel in _OF_SETTINGS else help) + added)
                    for name, help, added in rows
                ],
                col_max=WIDEST_NAME,
            )


def _sentences(help: str, columns: int) -> str:
    """Return the first sentence of a help text, and as many more as one line of ``columns`` has room for."""
    text, *others = re.split(r"(?<=\.) ", help)
    for sentence in others:
        if len(text) + 1 + len(sentence) > columns:
            break
        text += f" {sentence}"
    return text
