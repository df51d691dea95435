"""The settings of a server, besides those of its engine. Nothing mutates a config."""

from dataclasses import dataclass
from typing import Annotated

from lamina.config.settings import Meaning, settings


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How `lamina launch` serves HTTP. Raises ConfigError for a value of the wrong type or outside its range."""

    host: Annotated[str, Meaning("Address to listen on; 0.0.0.0 is all of them.", group="Network", common=True)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Meaning("Port to listen on; 0 is any free one.", group="Network", unit="port", ge=0, le=65535, common=True)
    ] = 8000
    frontends: Annotated[
        int,
        Meaning(
            "Processes for HTTP and tokenizing. They detokenize too. With 0, the engine's process does it all.",
            group="Network",
            unit="processes",
            ge=0,
            le=64,
        ),
    ] = 1

    def __post_init__(self) -> None:
        for setting in settings(type(self)):
            setting.validate(getattr(self, setting.name))
