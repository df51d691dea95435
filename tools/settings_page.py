"""The page of settings and environment variables in the documentation, generated from their definitions."""

import inspect
import re

from lamina.config import EngineConfig
from lamina.env import Environment
from lamina.settings import Setting, settings


def settings_page(config: type[object] = EngineConfig) -> str:
    """One table of all settings of ``config``."""
    rows = [
        f"| `{setting.name}` | {_values(setting)} | {setting.range} | {setting.meaning.unit} | {_default(setting)} "
        f"| {setting.meaning.help} |"
        for setting in settings(config)
    ]
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
            "This table is generated from the code.",
            "",
            "| Setting | Values | Range | Unit | Default | Meaning |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "## Environment variables",
            "",
            "| Variable | Meaning |",
            "|---|---|",
            *_variables(),
            "",
        ]
    )


def _values(setting: Setting) -> str:
    """The names of its types, or its choices."""
    names = setting.choices or [kind.__name__ for kind in setting.kinds]
    return ", ".join(f"`{name}`" for name in names)


def _default(setting: Setting) -> str:
    return "" if setting.default is None else f"`{setting.default}`"


def _variables() -> list[str]:
    """Rows of the environment variables, from the docstring of ``Environment``."""
    text = inspect.cleandoc(Environment.__doc__ or "")
    entries = re.findall(r"^    \w+: ``(LAMINA_\w+)``, (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return [f"| `{name}` | {' '.join(meaning.split()).replace('``', '`')} |" for name, meaning in entries]
