"""The options of `plan`. Light: the command line is built before it is known which command is run.

    --devices N                the best layouts of our trainer     --top --constraints --rank
    --layout tp=8,pp=8,...     one layout, as it is given          of our trainer or of others
    --calibrate RESULTS.json   a machine file from measurements    --output

What goes together and what a text may say is checked in question.py.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command `plan`."""
    parser.description = (
        "Predict memory, step time and cost of training a model on a machine, and search the layouts for the fastest "
        "that fits; or predict one layout as given. Nothing is run, so it answers at once on a laptop."
    )
    asked = parser.add_argument_group("the question")
    asked.add_argument("--machine", metavar="NAME", help="of hpcllm/machines, or a file like those")
    asked.add_argument("--model", metavar="NAME", help="a preset, or a shape: layers=24,hidden=2048,heads=16,vocab=...")
    asked.add_argument("--devices", metavar="N", help="to use; a device is what one rank drives")
    asked.add_argument("--global-batch", metavar="N", help="samples of a step, over all devices")
    asked.add_argument("--sequence", metavar="N", help="tokens of a sample (default: the model's longest)")
    asked.add_argument("--tokens", metavar="N", help="to train on, as 300e9 or 300B (default: 20 a parameter)")
    asked.add_argument(
        "--layout", metavar="tp=8,pp=8,...", help="predict this one; another trainer's, unless it says trainer=hpcllm"
    )
    asked.add_argument(
        "--constraints",
        action="append",
        default=[],
        metavar="tp<=8,recompute=none|full",
        help="search only layouts like this; may be repeated",
    )
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--top", metavar="N", help="rows of the table (default: 10)")
    answer.add_argument(
        "--explain", nargs="?", const="1", metavar="RANK", help="the whole arithmetic of a row (default: the first)"
    )
    answer.add_argument("--rank", metavar="RANK", help="the row that --write takes (default: 1)")
    answer.add_argument("--write", metavar="RUN.toml", help="write a run file of the best layout, or of --rank")
    answer.add_argument("--plot", metavar="FILE", help="draw times, memory and scaling: .svg or .png")
    answer.add_argument("--json", action="store_true", help="print as JSON, units in the keys")
    measured = parser.add_argument_group("a machine of your own")
    measured.add_argument(
        "--calibrate", nargs="+", metavar="RESULTS.json", help="make a machine file of what was measured on it"
    )
    measured.add_argument("--output", metavar="FILE", help="with --calibrate: the machine file to write")
