"""Run ``ort-zero aggregate``: write the whole model of a sharded checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ort_zero.checkpoint.files.dtypes import CHOICES
from ort_zero.cli import add_command, add_source, add_source_options
from ort_zero.cli.ranks import SHARED_WORK, on_launched_ranks
from ort_zero.utils.sizes import decimal_size, duration
from ort_zero.utils.tables import aligned

if TYPE_CHECKING:
    from ort_zero.checkpoint.aggregation.aggregation import AggregateReport

_EPILOG = SHARED_WORK.format(command="aggregate")


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "write the model (and optimizer) of a sharded checkpoint, ours, DeepSpeed's or torch's, for from_pretrained"
    parser = add_command(subparsers, "aggregate", text, _EPILOG)
    add_source(parser)
    parser.add_argument("dst", metavar="DST", help="folder or URL to write into")
    kinds = ("weights", "weights+optimizer", "adapter")
    text = "adapter: PEFT's files alone (default: weights)"
    parser.add_argument("--what", choices=kinds, default="weights", help=text)
    text = "dtype of floating-point weights; optimizer state keeps its dtype (default: keep)"
    parser.add_argument("--dtype", choices=CHOICES, default="keep", help=text)
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="per file: 5GB, 500MB, 2GiB, or bytes")
    formats = ("safetensors", "torch")
    parser.add_argument("--format", choices=formats, default=formats[0], help="file format of the weights")
    parser.add_argument("--workers", type=int, metavar="N", help="threads of a rank (default: by cores)")
    origins = "module: where weights were put into the module after the last step, these (default: masters)"
    parser.add_argument("--from", dest="weights_from", choices=("masters", "module"), default="masters", help=origins)
    parser.add_argument("--base", metavar="MODEL", help="takes frozen parameters that the save left out from MODEL")
    parser.add_argument("--part", action="store_true", help="write a model without what the save left out")
    parser.add_argument("--exclude-frozen", action="store_true", help="leave out frozen parameters")
    parser.add_argument("--dry-run", action="store_true", help="list the files that would be written, and write none")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not check the source's checksums")
    parser.add_argument("--overwrite", action="store_true", help="replace the model in DST")
    names = parser.add_argument_group("names and adapters")
    names.add_argument("--strip-prefix", metavar="P", action="append", default=[], help="take P off names; repeatable")
    text = "regular expression and replacement; repeatable"
    names.add_argument("--rename", metavar="FROM=TO", action="append", default=[], help=text)
    names.add_argument("--merge-lora", action="store_true", help="add LoRA to the base weights, write the base model")
    names.add_argument("--adapter", metavar="NAME", help="which adapter of several")
    parser.add_argument("--strict", action="store_true", help="refuse weights with NaN or inf instead of warning")
    add_source_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Aggregate the checkpoint, print the report on rank 0, and return the exit status."""
    from ort_zero.checkpoint.aggregation.aggregation import aggregate

    return on_launched_ranks(args, aggregate, text_of)


def text_of(report: AggregateReport) -> str:
    """Return the report as the lines that the command prints."""
    stage = "" if report.source_format == "dcp" else f", ZeRO-{report.zero_stage}"
    where = f"{report.source} ({report.source_format}, tag {report.tag}{stage})"
    lines = [f"source: {where}", f"destination: {report.destination}"]
    lines += aligned([(f"  {name}", f"{decimal_size(size):>10}") for name, size in report.files.items()])
    for origin in dict.fromkeys(report.copied.values()):
        names = ", ".join(name for name, other in report.copied.items() if other == origin)
        lines.append(f"copied from {origin}: {names}")
    counts = f"{report.tensors} tensors, {report.parameters:,} parameters"
    what = f"{counts}, dtype {report.dtype}, {decimal_size(report.bytes)}"
    if report.dry_run:
        lines.append(f"would write {what}")
    else:
        checked = "checked" if report.verified else "not checked"
        lines.append(f"wrote {what} {duration(report.bytes, report.seconds)}, source {checked}")
    lines += [f"warning: {text}" for text in report.warnings]
    return "\n".join(lines)
