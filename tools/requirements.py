"""Prints what pyproject.toml requires, for ``pip install -r``: ``requirements.py [EXTRA]``."""

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"]] if not extras else [project["optional-dependencies"][name] for name in extras]
    print(*(requirement for each in wanted for requirement in each), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
