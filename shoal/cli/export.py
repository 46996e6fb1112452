"""`shoal export`: a trained network as one file for other programs."""

from pathlib import Path

import click

from shoal.units import show_bytes


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch-export", "onnx"]),
    help="What to write; the file's ending tells it unless given: .safetensors, .pt2, .onnx.",
)
@click.option(
    "--model", metavar="TEXT", help="The network where the run's own name for it does not lead to it any more."
)
def export(run: Path, file: Path, form: str | None, model: str | None) -> None:
    """Write a trained network as one file for other programs.

    RUN is the folder of a finished run, or its model.safetensors. A .safetensors file holds all weights, a .pt2 file
    the network itself (torch.export), an .onnx file the same for ONNX's runtimes. What inference needs is inside each.
    """
    # torch loads here and not before: a wrong option is answered at once
    from shoal.using import load
    from shoal.using.exporting import export as write

    trained = load(run, model=model)
    written = write(trained, file, form)
    click.echo(f"{file}: {written}, {show_bytes(file.stat().st_size)}")
