"""The papers' numbers beside ours, as one HTML report.

    python bench/cost/report.py [--out FILE] [--json FILE] [--figures DIRECTORY]
    lamina bench cost

Every number of ours comes from the catalogue and the cost model that `lamina plan` uses; nothing is tuned to a figure.
Needs matplotlib (``pip install matplotlib``).
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:  # run as a script: import from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).parents[2])

from bench.cost import published
from bench.cost.bursts import burst
from bench.cost.elastic import scaling
from bench.cost.lamina_operators import figure_14, figures_3_to_6
from bench.cost.lamina_paper import figure_1, figure_17, figures_12_and_13, table_1, table_3
from bench.cost.long_context import figure_7, iteration_time, mnemosyne, shipping
from bench.cost.mechanisms import mechanisms
from bench.cost.page import Section, html
from bench.cost.second_paper import equal_cost
from lamina.planning.plan import hardware

INTRODUCTION = (
    "What papers print about the cost of serving large language models, beside what Lamina's catalogue of hardware and "
    "its cost model say about the same devices. Ours is a model: matrix products, attention and collectives are fitted "
    "to kernels measured on an A100, an H100 and an L40S, and everything else follows from the catalogue "
    "(docs/cost-model.md). Nothing is tuned to a figure.",
    "Ratio: ours over the published number. A sentence says why wherever the two differ by more than a "
    "tenth. Where a paper's "
    "figure cannot be read as text, the numbers are those that its text states.",
)


def sections(catalogue: hardware.Catalogue) -> list[Section]:
    papers = published.load()
    first, infinite = papers["lamina"], papers["infinite_llm"]
    return [
        table_1(first, catalogue),
        figures_3_to_6(first, catalogue),
        figure_1(first, catalogue),
        table_3(first, catalogue),
        figures_12_and_13(first, catalogue),
        figure_14(first, catalogue),
        figure_17(first, catalogue),
        equal_cost(papers["lamina_second"], catalogue),
        figure_7(infinite, catalogue),
        shipping(infinite, catalogue),
        iteration_time(papers["loongserve"], catalogue),
        scaling(papers["loongserve"], catalogue),
        mnemosyne(papers["mnemosyne"], catalogue),
        mechanisms(papers["mechanisms"], catalogue),
        burst(papers["kernelflume"], catalogue),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lamina-cost.html"), help="the report")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--figures", type=Path, help="write every figure as PNG into this directory")
    arguments = parser.parse_args()
    made = sections(hardware.load())
    arguments.out.write_text(html("Cost of LLM inference: papers and Lamina", INTRODUCTION, made))
    print(f"{arguments.out}: {len(made)} sections, {sum(len(one.figures) for one in made)} figures")
    if arguments.json:
        arguments.json.write_text(json.dumps({one.title: one.data for one in made}, indent=1) + "\n")
    if arguments.figures:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        for name, figure in ((name, figure) for one in made for name, figure in one.figures.items()):
            figure.savefig(arguments.figures / f"{name}.png", dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
