"""Derives keyword arguments, help, checks and the reading of YAML files from a config's annotated fields.

``lamina --help`` imports this, so pydantic and PyYAML are imported only when a value is checked or a file is read.
"""

import dataclasses
import difflib
import enum
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from lamina.core.errors import ConfigError

Group = Literal["Model", "Pools", "Memory", "Scheduling", "Network", "Advanced"]
"""The part of Lamina that a setting concerns."""


@dataclass(frozen=True)
class Meaning:
    """What the type of a setting does not say.

    Attributes:
        help: What the setting does. `lamina COMMAND -h` shows the first sentence.
        group: The panel of the help and the part of the page that describe the setting.
        unit: The unit of its value.
        ge: The least value.
        le: The largest value.
        common: The setting is one of the dozen that `lamina COMMAND -h` shows first.
    """

    help: str
    group: Group = "Advanced"
    unit: str = ""
    ge: float | None = None
    le: float | None = None
    common: bool = False


@dataclass(frozen=True)
class Setting:
    """One field of a config.

    Attributes:
        name: The name of the field.
        hint: Its type, as annotated.
        meaning: What the type does not say.
        default: The value of the field where none is given.
        kinds: The types in ``hint`` other than None, Literals and Enums.
        choices: The values of its Literals and Enums.
        optional: True if the value may be None.
    """

    name: str
    hint: Any
    meaning: Meaning
    default: Any
    kinds: tuple[type, ...]
    choices: tuple[str, ...]
    optional: bool

    @property
    def range(self) -> str:
        """The range as text, such as "at least 1" or "1 to 15"; empty if the setting has no bounds."""
        low, high = self.meaning.ge, self.meaning.le
        if low is None or high is None:
            return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""
        return f"{low} to {high}"

    @property
    def help(self) -> str:
        """The help with unit and range: "Batches in flight. (lanes, at least 1)"."""
        detail = ", ".join(filter(None, (self.meaning.unit, self.range)))
        return f"{self.meaning.help} ({detail})" if detail else self.meaning.help

    def validate(self, value: object) -> None:
        """Raise ConfigError if ``value`` has the wrong type or is outside the range."""
        if value is self.default:
            return
        from pydantic import ValidationError

        try:
            _validator(self.hint, self.meaning)(value)
        except ValidationError:
            raise ConfigError(f"{self.name} is {_shown(value)}; give {self._expected()}") from None

    def parse(self, value: object) -> object:
        """Return a value from the command line or a file: unchanged, but an optional number may be "auto", which is
        None."""
        return None if value == "auto" and self.optional and int in self.kinds else value

    def _expected(self) -> str:
        if self.choices:
            *others, last = self.choices
            wanted = f"{', '.join(others)} or {last}"
        elif self.range:
            wanted = f"{_WANTED[self.kinds[0]]} {'of' if self.range.startswith('at') else 'from'} {self.range}"
        else:
            wanted = _WANTED[self.kinds[0]]
        return f"{wanted}, or leave it out" if self.optional else wanted


_WANTED: dict[type, str] = {int: "a whole number", bool: "True or False", str: "a text", float: "a number"}


def _shown(value: object) -> str:
    return repr(value.value if isinstance(value, enum.Enum) else value)


@functools.cache
def _validator(hint: Any, meaning: Meaning) -> Callable[[object], object]:
    from pydantic import ConfigDict, Field, TypeAdapter

    return TypeAdapter(
        Annotated[hint, Field(ge=meaning.ge, le=meaning.le)], config=ConfigDict(strict=True)
    ).validate_python


def settings(config: type[Any]) -> tuple[Setting, ...]:
    """Return the settings of ``config``, a dataclass whose fields are ``Annotated[type, Meaning]``, in order."""
    return _settings(cast(Hashable, config))


@functools.cache
def _settings(config: Any) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(config, include_extras=True)
    return tuple(_setting(field, hints[field.name]) for field in dataclasses.fields(config))


def _setting(field: "dataclasses.Field[Any]", annotated: Any) -> Setting:
    hint, meaning = typing.get_args(annotated)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    choices: dict[str, None] = {}
    kinds: list[type] = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            choices |= dict.fromkeys(typing.get_args(part))
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            choices |= {member.value: None for member in part}
        elif part is not types.NoneType:
            kinds.append(part)
    optional = types.NoneType in parts
    return Setting(field.name, hint, meaning, field.default, tuple(kinds), tuple(choices), optional)


def plain_values(config: Any) -> dict[str, Any]:
    """Return the settings of ``config``, a dataclass, by name, as values that msgspec can encode."""
    values = {setting.name: getattr(config, setting.name) for setting in settings(type(config))}
    return {
        name: value.value
        if isinstance(value, enum.Enum)
        else os.fspath(value)
        if isinstance(value, os.PathLike)
        else value
        for name, value in values.items()
    }


def read_settings(
    file: Path,
    *configs: type[Any],
    others: Collection[str] = (),
    elsewhere: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Return the values in a YAML file, by name. Settings that contradict each other are left to ``configs``.

    Args:
        file: The YAML file.
        configs: The dataclasses whose settings the file may have.
        others: Further names that the file may have; their values are returned unchecked.
        elsewhere: By name of a setting that the file may not have: the command that has it.

    Raises ConfigError, naming the file, if it cannot be read, names an unknown setting or has an invalid value.
    """
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; give a YAML file of settings") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds {_shown(content)}; give one 'name: value' on each line")
    known = {setting.name: setting for config in configs for setting in settings(config)}
    for name in content:
        if name in elsewhere and name not in known and name not in others:
            raise ConfigError(f"{file}: {name} is a setting of `{elsewhere[name]}` alone; leave it out here")
        if name not in known and name not in others:
            raise ConfigError(f"{file}: there is no setting {name!r}; {_nearest(str(name), [*known, *others])}")
    values = {name: known[name].parse(value) if name in known else value for name, value in content.items()}
    for name, value in values.items():
        if name not in known:
            continue
        try:
            known[name].validate(value)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
    return values


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1, cutoff=0.0)
    return f"the nearest name is {near[0]!r}"


P = ParamSpec("P")
Self = TypeVar("Self")
Config = TypeVar("Config")


def keywords_of(
    config: Callable[P, Config],
) -> Callable[[Callable[[Self, Config], None]], Callable[Concatenate[Self, P], None]]:
    """Turn ``__init__(self, config)`` into one that takes the settings of ``config``, a dataclass, as arguments.

    Type checkers see these parameters, and ``__signature__`` and ``__doc__`` list them. An unknown argument raises
    ConfigError with the nearest name.
    """

    def decorate(init: Callable[[Self, Config], None]) -> Callable[Concatenate[Self, P], None]:
        def with_keywords(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> None:
            for name in kwargs:
                if name not in known:
                    raise ConfigError(f"there is no setting {name!r}; {_nearest(name, known)}")
            init(self, config(*args, **kwargs))

        known = {setting.name: setting for setting in settings(cast(type[Any], config))}
        parameters = inspect.signature(config).parameters.values()
        own = inspect.signature(init)
        described = {
            "__module__": init.__module__,
            "__name__": init.__name__,
            "__qualname__": init.__qualname__,
            "__doc__": "\n".join(["Args:", *(f"    {name}: {setting.help}" for name, setting in known.items())]),
            "__signature__": own.replace(
                parameters=[
                    inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
                    *(parameter.replace(annotation=known[parameter.name].hint) for parameter in parameters),
                ]
            ),
        }
        for name, value in described.items():
            setattr(with_keywords, name, value)
        return with_keywords

    return decorate
