"""Writes the page of settings and environment variables in the documentation from their definitions.

python -m tools.settings_page > docs/settings.md
"""

import inspect
import re
from typing import get_args

from lamina.config.engine_config import EngineConfig
from lamina.config.environment import Environment
from lamina.config.server_config import ServerConfig
from lamina.config.settings import Group, Setting, settings

HEAD = """\
# Settings

Settings of the engine are keyword arguments of [`Lamina`](api.md#lamina.Lamina), and options of every command that runs
a model (`generate`, `chat`, `batch`, `launch`, `bench`). As an option, `max_num_seqs` is `--max-num-seqs`; a setting of
type `bool`, such as `tls`, is `--tls` or `--no-tls`. An optional number may be `auto`, its default. Settings of the
server are options of `lamina launch`. `--config FILE.yaml` reads settings from a file; options override it:

```yaml
compute: cpu:1
memory: cpu:2
max_num_seqs: 64
tls: true
```

This page is generated from the code by `python -m tools.settings_page`.
"""


def settings_page(*configs: type[object]) -> str:
    """Return the page in Markdown, with a section for each setting of ``configs`` and for each variable."""
    known = [setting for config in configs or (EngineConfig, ServerConfig) for setting in settings(config)]
    lines = [HEAD]
    for group in get_args(Group):
        lines += [f"## {group}", ""]
        for setting in known:
            if setting.meaning.group == group:
                lines += _section(setting)
    lines += ["## Environment variables", ""]
    for name, meaning in _variables():
        lines += [f"### `{name}`", "", meaning, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(setting: Setting) -> list[str]:
    values = " or ".join(f"`{name}`" for name in setting.choices or [kind.__name__ for kind in setting.kinds])
    default = "" if setting.default is None else f"default `{setting.default}`"
    facts = ", ".join(filter(None, (values, setting.range, setting.meaning.unit, default)))
    return [f"### `{setting.name}`", "", facts, "", setting.meaning.help, ""]


def _variables() -> list[tuple[str, str]]:
    """The environment variables and what they mean, from the docstring of ``Environment``."""
    text = inspect.cleandoc(Environment.__doc__ or "")
    entries = re.findall(r"^    \w+: ``(LAMINA_\w+)``, (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return [(name, " ".join(meaning.split()).replace("``", "`")) for name, meaning in entries]


if __name__ == "__main__":
    print(settings_page(), end="")
