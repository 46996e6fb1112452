"""What every network asks of a sample's shape before it is built."""

from shoal.errors import ModelError

_LAYOUTS = {2: "channels,height,width", 3: "channels,depth,height,width"}


def shape_text(shape: tuple[int, ...], separator: str = ",") -> str:
    """A shape as the command line writes it.

    >>> shape_text((3, 224, 224)), shape_text((224, 224), "x")
    ('3,224,224', '224x224')
    """
    return separator.join(map(str, shape))


def check_sample(network: str, input: tuple[int, ...], classes: int, *smallest: tuple[int, ...]) -> None:
    """Refuse a sample's shape or a number of classes that `network` cannot take.

    `smallest` holds, for each layout that the network takes, the least spatial extents that leave
    every layer something to work on: one tuple for a planar network, two for one that also takes volumes.
    """
    given = shape_text(input)
    least = next((extents for extents in smallest if len(extents) == len(input) - 1), None)
    if least is None:
        layouts = " or ".join(_LAYOUTS[len(extents)] for extents in smallest)
        example = shape_text((1, *smallest[0]))
        raise ModelError(
            f"{network} cannot take the input shape {given}: it has {len(input)} numbers.",
            f"Give one sample's shape as {layouts}, for example {example}.",
        )
    if not all(isinstance(size, int) and size >= 1 for size in input):
        raise ModelError(
            f"{network} cannot take the input shape {given}: every number must be a whole one above 0.",
            f"Give one sample's shape as {_LAYOUTS[len(least)]}, for example {shape_text((1, *least))}.",
        )
    extents = input[1:]
    if any(size < needed for size, needed in zip(extents, least, strict=True)):
        fits = (input[0], *map(max, extents, least))
        raise ModelError(
            f"{network} cannot take the input shape {given}: {shape_text(extents, 'x')} is too small for its strides.",
            f"The smallest that works is {shape_text(least, 'x')}: "
            f"give {shape_text(fits)} or more, or choose a network with fewer strides.",
        )
    if not isinstance(classes, int) or classes < 1:
        raise ModelError(f"{network} cannot have {classes} classes.", "Give a number of classes of at least 1.")


def check_at_least_one(network: str, **options: int) -> None:
    """Refuse an option of `network` that counts something and is below 1."""
    for name, value in options.items():
        if value < 1:
            raise ModelError(f"{network} cannot have a {name} of {value}.", f"Give a {name} of at least 1.")
