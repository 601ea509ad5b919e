"""`parverify supports [MODEL]`: which ONNX operators can be bounded, in general or in one network."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from parverify.cli.files import check_model
from parverify.cli.streams import to_stdout
from parverify.cli.work import Boundary
from parverify.errors import ModelError, UnsupportedOperatorError, UsageError


@click.command(short_help="List the supported operators, or check those of one network.")
@click.argument("model", required=False)
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.pass_context
def command(ctx: click.Context, /, model: str | None, verbose: bool) -> None:
    """List the ONNX operators that can be verified; with MODEL, those it uses and whether each is supported.

    A line is: operator, how often MODEL uses it, `yes` or `no`. Exit codes: 0 all supported, 21 the network can't be
    read, 22 some are not supported.
    """
    with Boundary(verbose=verbose) as boundary:
        if model is not None:
            check_model(model)
        _supports(model)
    if boundary.outcome is not None:
        click.echo(f"{boundary.outcome.verdict}: {boundary.outcome.reason}", err=True)
        ctx.exit(boundary.outcome.exit_code)


def _supports(model: str | None) -> None:
    from parverify.api import supported_operators

    supported = set(supported_operators())
    if model is None:
        with to_stdout():
            click.echo("\n".join(sorted(supported)))
        return
    nodes = _operators(model)
    counts = Counter(operator for _, operator in nodes)
    with to_stdout():
        for operator in sorted(counts):
            click.echo(f"{operator}\t{counts[operator]}\t{'yes' if operator in supported else 'no'}")
    missing = [(name, operator) for name, operator in nodes if operator not in supported]
    if missing:
        raise UnsupportedOperatorError(missing)


def _operators(model: str) -> list[tuple[str, str]]:
    """Pairs of (node name, operator) in the network, subgraphs and local functions included.

    Raises:
        ModelError: if the file is no ONNX network.
    """
    from pathlib import Path

    from parverify.frontend.files import read_bytes

    try:
        data = read_bytes(Path(model))
    except UsageError as error:
        raise ModelError(error.message, error.hint) from error
    import onnx
    from google.protobuf.message import DecodeError

    try:
        network = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(f"{model} is not an ONNX network: {error}") from error
    found = _walk(network.graph.node)
    if not found:
        raise ModelError(f"{model} is not an ONNX network, or has no nodes")
    return found + [pair for function in network.functions for pair in _walk(function.node)]


def _walk(nodes: Any) -> list[tuple[str, str]]:
    found = []
    for node in nodes:
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
        found.append((node.name or node.output[0], domain + node.op_type))
        for attribute in node.attribute:
            for graph in [attribute.g, *attribute.graphs]:
                found += _walk(graph.node)
    return found
