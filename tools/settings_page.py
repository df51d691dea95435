"""The page of settings and environment variables in the documentation, generated from their definitions."""

import inspect
import re

from lamina.config.engine_config import EngineConfig
from lamina.config.environment import Environment
from lamina.config.settings import Setting, settings


def settings_page(config: type[object] = EngineConfig) -> str:
    """A section for each setting of ``config`` and for each variable, so that each has a link of its own."""
    return "\n".join(
        [
            "# Settings",
            "",
            "Settings of the engine are keyword arguments of [`Lamina`](api.md#lamina.Lamina), and options of every",
            "command that runs a model (`generate`, `chat`, `launch`, `bench`). As an option, `max_num_seqs` is",
            "`--max-num-seqs`; a setting of type `bool`, such as `tls`, is `--tls` or `--no-tls`. An optional",
            "number may be `auto`, its default. `--config FILE.yaml` reads settings, and the command's own options",
            "such as `port`, from a file; options override it:",
            "",
            "```yaml",
            "compute: cpu:1",
            "memory: cpu:2",
            "max_num_seqs: 64",
            "tls: true",
            "```",
            "",
            "This page is generated from the code.",
            "",
            *(line for setting in settings(config) for line in _section(setting)),
            "## Environment variables",
            "",
            *(line for name, meaning in _variables() for line in (f"### `{name}`", "", meaning, "")),
        ]
    )


def _section(setting: Setting) -> list[str]:
    values = " or ".join(f"`{name}`" for name in setting.choices or [kind.__name__ for kind in setting.kinds])
    default = "" if setting.default is None else f"default `{setting.default}`"
    facts = ", ".join(filter(None, (values, setting.range, setting.meaning.unit, default)))
    return [f"## `{setting.name}`", "", facts, "", setting.meaning.help, ""]


def _variables() -> list[tuple[str, str]]:
    """The environment variables and what they mean, from the docstring of ``Environment``."""
    text = inspect.cleandoc(Environment.__doc__ or "")
    entries = re.findall(r"^    \w+: ``(LAMINA_\w+)``, (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return [(name, " ".join(meaning.split()).replace("``", "`")) for name, meaning in entries]
